// What is done with the blocks of a delta: write, set, gather, sum, preview. Part of level.inl.

namespace deltarefit::DR_LEVEL {

// Element addresses of a block's positions in the array of a job.
template <class W>
class Elements {
 public:
  explicit Elements(const Job& job) : walker_(*job.array), first_(job.first) {
    if (job.array->contiguous()) base_ = job.array->data + job.first * sizeof(W);
  }

  // Calls use(i, address) for each position of the block, i from 0.
  template <class Use>
  void visit(const Block<W>& block, Use use) {
    const u64* offsets = block.offsets;
    const u32 n = block.n;
    if (base_ == nullptr) {
      for (u32 i = 0; i < n; ++i) use(i, walker_.at(first_ + block.base + offsets[i]));
      return;
    }
    u8* base = base_ + block.base * sizeof(W);
    if (block.dense()) {
      base += offsets[0] * sizeof(W);
      for (u32 i = 0; i < n; ++i) use(i, base + i * sizeof(W));
    } else {
      for (u32 i = 0; i < n; ++i) {
        // Hardware only sees the next line coming where changes are dense.
        __builtin_prefetch(base + offsets[i + kAhead < n ? i + kAhead : n - 1] * sizeof(W), 1);
        use(i, base + offsets[i] * sizeof(W));
      }
    }
  }

 private:
  static constexpr u32 kAhead = 24;

  Walker walker_;
  u64 first_;
  u8* base_ = nullptr;
};

template <class W>
inline W updated(u32 operation, W live, W value) {
  return operation == kXor ? W(live ^ value) : operation == kAdd ? W(live + value) : value;
}

template <class W>
inline Status apply_as(const Job& job) {
  Elements<W> elements(job);
  const u32 operation = Code::unpack(job.record->code).operation;
  return for_each_placed<W>(*job.record, *job.pieces, [&](const Block<W>& block) {
    const W* values = block.values;
    if (operation == kXor)
      elements.visit(block, [&](u32 i, u8* at) { store<W>(at, W(load<W>(at) ^ values[i])); });
    else if (operation == kAdd)
      elements.visit(block, [&](u32 i, u8* at) { store<W>(at, W(load<W>(at) + values[i])); });
    else
      elements.visit(block, [&](u32 i, u8* at) { store<W>(at, values[i]); });
  });
}

template <class W>
inline Status apply_values_as(const Job& job, const View& values) {
  Elements<W> elements(job);
  Reader<W> reader(values);
  u8 copy[kBlock * sizeof(W)];
  return for_each_placed<W>(*job.record, *job.pieces, [&](const Block<W>& block) {
    const u8* from = reader.next(block.n, copy);
    elements.visit(block, [&](u32 i, u8* at) { store<W>(at, load<W>(from + i * sizeof(W))); });
  });
}

template <class W>
inline Status gather_as(const Job& job, u8* out) {
  Elements<W> elements(job);
  return for_each_placed<W>(*job.record, *job.pieces, [&](const Block<W>& block) {
    u8* to = out + block.index * sizeof(W);
    elements.visit(block, [&](u32 i, u8* at) { store<W>(to + i * sizeof(W), load<W>(at)); });
  });
}

template <class W>
inline Status sums_as(const Job& job, u64 key, Lanes& out) {
  Elements<W> elements(job);
  const u64 low = job.record->low();
  W live[kBlock];
  return for_each_placed<W>(*job.record, *job.pieces, [&](const Block<W>& block) {
    elements.visit(block, [&](u32 i, u8* at) { live[i] = load<W>(at); });
    out = out + digest_sparse(block.offsets, low + block.base, live, block.n, key);
  });
}

template <class W>
inline Status preview_as(const Job& job, u64 key, Lanes& before, Lanes& after, u8* out) {
  Elements<W> elements(job);
  const u64 low = job.record->low();
  const u32 operation = Code::unpack(job.record->code).operation;
  W live[kBlock], next[kBlock];
  return for_each_placed<W>(*job.record, *job.pieces, [&](const Block<W>& block) {
    elements.visit(block, [&](u32 i, u8* at) { live[i] = load<W>(at); });
    for (u32 i = 0; i < block.n; ++i) next[i] = updated(operation, live[i], block.values[i]);
    digest_pair(block.offsets, low + block.base, live, next, block.n, key, before, after, [] {});
    __builtin_memcpy(out + block.index * sizeof(W), next, block.n * sizeof(W));
  });
}

template <class W>
inline Lanes digest_as(const View& array, const Place& place) {
  if (array.contiguous()) return digest_all<W>(array.data, array.numel, place.start, place);
  Reader<W> reader(array);
  u8 copy[kChunk * sizeof(W)];
  Lanes sum;
  for (u64 at = 0; at < array.numel; at += kChunk) {
    const u64 n = array.numel - at < kChunk ? array.numel - at : kChunk;
    sum = sum + digest_all<W>(reader.next(n, copy), n, place.start + at, place);
  }
  return sum;
}

template <class W>
inline u64 count_changed_as(const View& older, const View& newer) {
  if (older.contiguous() && newer.contiguous()) return count_changed_in<W>(older.data, newer.data, older.numel);
  Reader<W> old_reader(older), new_reader(newer);
  u8 old_copy[kChunk * sizeof(W)], new_copy[kChunk * sizeof(W)];
  u64 count = 0;
  for (u64 at = 0; at < older.numel; at += kChunk) {
    const u64 n = older.numel - at < kChunk ? older.numel - at : kChunk;
    const u8* a = old_reader.next(n, old_copy);
    count += count_changed_in<W>(a, new_reader.next(n, new_copy), n);
  }
  return count;
}

}  // namespace deltarefit::DR_LEVEL
