// Two arrays to one delta: scan and extract, choose, pack. Part of level.inl.

namespace deltarefit::DR_LEVEL {

// What the scan leaves in scratch.
template <class W, class G>
struct Changes {
  u64 count = 0;
  u64 numel = 0;
  const G* gaps = nullptr;  // null: every position is listed
  const W* olds = nullptr;
  const W* news = nullptr;
};

// Adds the digests of both sides of a chunk's changes to `sums`; its element 0 is the piece's element `at`.
template <class W>
inline void sum_changes(const Place& place, RowWalker& walker, u64 at, const u32* offsets, const W* olds, const W* news,
                        u32 n, Lanes* sums, Ahead ahead) {
  const auto meanwhile = [&] { ahead.ask(); };
  if (place.rows.flat()) return digest_pair(offsets, at, olds, news, n, place.key, sums[0], sums[1], meanwhile);
  u64 positions[kChunk];
  walker.place(offsets, at, n, 0, positions);
  digest_pair(positions, 0, olds, news, n, place.key, sums[0], sums[1], meanwhile);
}

// Scan a pair of views; adds up the digest sums of both sides when `sums` is not null.
template <class W, class G>
inline Status scan(const View& older, const View& newer, const Place& place, Lanes* sums, Scratch& scratch,
                   Changes<W, G>& out) {
  alignas(64) u8 old_copy[kChunk * sizeof(W)], new_copy[kChunk * sizeof(W)];
  u32 offsets[kChunk + kSlack];
  Reader<W> old_reader(older), new_reader(newer);
  RowWalker walker(place.rows);
  u64 count = 0, next = 0;  // next: first position after the last changed one
  for (u64 at = 0; at < older.numel; at += kChunk) {
    const u32 n = u32(older.numel - at < kChunk ? older.numel - at : kChunk);
    const u8* a = old_reader.next(n, old_copy);
    const u8* b = new_reader.next(n, new_copy);
    const u32 m = find_changed<W>(a, b, n, offsets);
    if (m == 0) continue;
    if (!scratch.gaps.grow((count + m) * sizeof(G), count * sizeof(G)) ||
        !scratch.olds.grow((count + m) * sizeof(W), count * sizeof(W)) ||
        !scratch.news.grow((count + m) * sizeof(W), count * sizeof(W)))
      return no_memory();
    G* gaps = scratch.gaps.as<G>() + count;
    W* olds = scratch.olds.as<W>() + count;
    W* news = scratch.news.as<W>() + count;
    gaps[0] = G(at + offsets[0] - next);
    for (u32 i = 1; i < m; ++i) gaps[i] = G(offsets[i] - offsets[i - 1] - 1);
    for (u32 i = 0; i < m; ++i) {
      olds[i] = load<W>(a + offsets[i] * sizeof(W));
      news[i] = load<W>(b + offsets[i] * sizeof(W));
    }
    const Ahead ahead(a + n * sizeof(W), b + n * sizeof(W));
    if (sums != nullptr) sum_changes(place, walker, place.start + at, offsets, olds, news, m, sums, ahead);
    next = at + offsets[m - 1] + 1;
    count += m;
  }
  out = Changes<W, G>{count, older.numel, scratch.gaps.as<G>(), scratch.olds.as<W>(), scratch.news.as<W>()};
  return {};
}

// All elements of a view as one array of W; the view's own memory when it can be used as it is.
template <class W>
inline const W* all_elements(const View& view, Buffer& buffer) {
  if (view.contiguous() && reinterpret_cast<std::uintptr_t>(view.data) % sizeof(W) == 0)
    return reinterpret_cast<const W*>(view.data);
  if (!buffer.grow(view.numel * sizeof(W), 0)) return nullptr;
  if (view.contiguous()) {
    __builtin_memcpy(buffer.data(), view.data, view.numel * sizeof(W));
  } else {
    Reader<W>(view).next(view.numel, buffer.data());
  }
  return buffer.as<W>();
}

template <class W, class G>
inline Status take_all(const View& older, const View& newer, const Place& place, Scratch& scratch,
                       Changes<W, G>& changes, Encoded& out) {
  const W* olds = all_elements<W>(older, scratch.olds);
  const W* news = all_elements<W>(newer, scratch.news);
  if (olds == nullptr || news == nullptr) return no_memory();
  changes = Changes<W, G>{older.numel, older.numel, nullptr, olds, news};
  const auto digest_of = [&](const W* values) {
    return digest_all<W>(reinterpret_cast<const u8*>(values), older.numel, place.start, place);
  };
  out.before = digest_of(olds);
  out.after = olds == news ? out.before : digest_of(news);
  return {};
}

// Appends pieces to scratch.out; sizes first, so that one growth is enough.
class Packer {
 public:
  Packer(Scratch& scratch, Encoded& out) : scratch_(scratch), out_(out) {}

  // Room for `bytes` more; data pointers are fixed up in finish().
  Status reserve(u64 bytes) {
    if (!scratch_.out.grow(used_ + bytes, used_)) return no_memory();
    return {};
  }

  // An integer array. Planes that were not forced grow until the chain is of sane length.
  template <class T>
  Status array(Role role, const T* values, u64 n, u32& planes, bool forced, u64& chain) {
    u64 extra = chain_extra(values, n, planes);
    while (!forced && extra > 8 * n + 65536 && planes < 8) extra = chain_extra(values, n, ++planes);
    chain = n + extra;
    if (chain > kMaxPieceBytes) return wrong("a piece would be too large; use more planes", kMaxPieceBytes, chain);
    DR_TRY(reserve(n * (planes - 1) + chain));
    if (!pack_array(values, n, planes, chain, scratch_.out.data() + used_))
      return wrong("the array was written to while it was encoded");
    for (u32 plane = 0; plane < planes; ++plane) add(role, planes, plane, plane + 1 < planes ? n : chain);
    return {};
  }

  template <class W>
  Status two_bit(const W* values, u64 n, W* escapes, u64& escaped) {
    const u64 bytes = (n + 3) / 4;
    DR_TRY(reserve(bytes));
    escaped = pack_two_bit(values, n, scratch_.out.data() + used_, escapes);
    add(kTwo, 0, 0, bytes);
    return {};
  }

  void finish() {
    u64 at = 0;
    for (u32 i = 0; i < out_.pieces.count; ++i) {
      out_.pieces.items[i].data = scratch_.out.data() + at;
      at += out_.pieces.items[i].size;
    }
  }

 private:
  void add(Role role, u32 planes, u32 plane, u64 size) {
    out_.pieces.items[out_.pieces.count++] = Piece{role, planes, plane, size, nullptr};
    used_ += size;
  }

  Scratch& scratch_;
  Encoded& out_;
  u64 used_ = 0;
};

template <class W, class G>
inline Status pack_positions(const Changes<W, G>& changes, const PositionPlan& plan, bool forced, Scratch& scratch,
                             Packer& packer, Record& record, Code& code) {
  code.kind = plan.kind;
  code.gap_planes = plan.gap_planes;
  if (plan.kind == kGaps)
    return packer.array(kGap, changes.gaps, changes.count, code.gap_planes, forced, record.gap_chain);
  code.run_planes = plan.run_planes;
  if (!scratch.work[0].grow(changes.count * sizeof(G), 0) || !scratch.work[1].grow(changes.count * sizeof(G), 0))
    return no_memory();
  G* starts = scratch.work[0].as<G>();
  G* lengths = scratch.work[1].as<G>();
  record.runs = runs_of_gaps(changes.gaps, changes.count, starts, lengths);
  DR_TRY(packer.array(kGap, starts, record.runs, code.gap_planes, forced, record.gap_chain));
  return packer.array(kRun, lengths, record.runs, code.run_planes, false, record.run_chain);
}

template <class W, class G>
inline Status pack_values(const Changes<W, G>& changes, const ValuePlan& plan, Scratch& scratch, Packer& packer,
                          Record& record, Code& code) {
  code.operation = plan.operation;
  code.packing = plan.packing;
  code.value_planes = plan.planes;
  const W* stored = changes.news;
  if (plan.operation != kSet) {
    if (!scratch.work[0].grow(changes.count * sizeof(W), 0)) return no_memory();
    stored = scratch.work[0].as<W>();
    stored_values(plan.operation, changes.gaps != nullptr, changes.olds, changes.news, changes.count,
                  scratch.work[0].as<W>());
  }
  if (plan.packing == kPlanes)
    return packer.array(value_role(plan.operation), stored, changes.count, code.value_planes, false,
                        record.value_chain);
  if (!scratch.work[1].grow((changes.count + 4) * sizeof(W), 0)) return no_memory();
  W* escapes = scratch.work[1].as<W>();
  DR_TRY(packer.two_bit(stored, changes.count, escapes, record.escapes));
  if (record.escapes == 0) {
    code.value_planes = 0;
    return {};
  }
  return packer.array(kEscape, escapes, record.escapes, code.value_planes, false, record.value_chain);
}

template <class W, class G>
inline Status pack_changes(const Changes<W, G>& changes, const Forced& forced, Scratch& scratch, Encoded& out) {
  Packer packer(scratch, out);
  Record& record = out.record;
  record.length = changes.numel;
  record.count = changes.count;
  Code code;
  code.kind = kAll;
  code.log_width = log_of_width(sizeof(W));
  if (!scratch.sample.grow(kChoiceBytes, 0)) return no_memory();
  if (changes.gaps != nullptr) {
    const PositionPlan plan =
        choose_positions(changes.gaps, changes.count, forced.kind, forced.gap_planes, scratch.sample.data());
    DR_TRY(pack_positions(changes, plan, forced.gap_planes > 0, scratch, packer, record, code));
  }
  const ValuePlan plan = choose_values(changes.olds, changes.news, changes.count, changes.gaps != nullptr,
                                       forced.operation, forced.packing, scratch.sample.data());
  DR_TRY(pack_values(changes, plan, scratch, packer, record, code));
  packer.finish();
  record.code = code.pack();
  out.nothing = false;
  return {};
}

// Whether a quick look says that nearly all elements changed: then the scan would be for nothing.
template <class W>
inline bool looks_dense(const View& older, const View& newer) {
  constexpr u64 kLooks = 64;
  if (!older.contiguous() || !newer.contiguous() || older.numel < kLooks * kChunk) return false;
  const u64 step = (older.numel - 64) / (kLooks - 1) * sizeof(W);
  u64 changed = 0;
  for (u64 i = 0; i < kLooks; ++i)
    changed += u64(__builtin_popcountll(changed_mask<W>(older.data + i * step, newer.data + i * step)));
  return changed > kLooks * 64 / 4 * 3;
}

template <class W, class G>
inline Status encode_as(const View& older, const View& newer, const Place& place, const Forced& forced,
                        Scratch& scratch, Encoded& out) {
  Changes<W, G> changes;
  out.record.start = place.start;
  out.record.rows = place.rows;
  const bool overwrite = forced.kind == int(kAll) && forced.operation == int(kSet);
  bool dense = overwrite || (forced.kind < 0 && looks_dense<W>(older, newer));
  if (!dense) {
    Lanes sums[2];
    DR_TRY((scan<W, G>(older, newer, place, sums, scratch, changes)));
    if (changes.count == 0) return {};
    out.before = sums[0];
    out.after = sums[1];
    dense = forced.kind == int(kAll) || (forced.kind < 0 && changes.count > older.numel / 5 * 3);
  }
  if (dense) DR_TRY((take_all<W, G>(older, newer, place, scratch, changes, out)));
  return pack_changes(changes, forced, scratch, out);
}

}  // namespace deltarefit::DR_LEVEL
