// What is done with the hits of a delta: check, write, sum, preview, list. Part of level.inl.

namespace deltarefit::DR_LEVEL {

template <class W, class S>
inline Status place_validate_as(const PlacedJob& job) {
  const bool reads = sizeof(W) != sizeof(S) && Code::unpack(job.record->code).operation != kSet;
  if (!reads) return for_each_block<W>(*job.record, *job.pieces, [](const Block<W>&) {});
  Hits<W, S> hits(job);
  DR_TRY(hits.start());
  Live<W, S> live(job);
  DR_TRY(for_each_placed<W>(*job.record, *job.pieces, [&](const Block<W>& block) {
    hits.visit(block, [&](u32, u32, u64 place) { live.read(place); }, [](u32) {});
  }));
  return live.check();
}

template <class W, class S>
inline Status place_apply_as(const PlacedJob& job, u64& count) {
  constexpr u32 kShift = Live<W, S>::kShift;
  Hits<W, S> hits(job);
  DR_TRY(hits.start());
  u8* const data = job.data;
  const u32 operation = Code::unpack(job.record->code).operation;
  const auto add_up = [&](u32 n) { count += n; };
  return for_each_placed<W>(*job.record, *job.pieces, [&](const Block<W>& block) {
    const W* values = block.values;
    const auto write = [&](auto next) {
      hits.visit(
          block,
          [&](u32, u32 i, u64 place) {
            u8* at = data + place * sizeof(S);
            store<S>(at, next(at, S(S(values[i]) << kShift)));
          },
          add_up);
    };
    if (operation == kXor) write([](const u8* at, S value) { return S(load<S>(at) ^ value); });
    else if (operation == kAdd) write([](const u8* at, S value) { return S(load<S>(at) + value); });
    else write([](const u8*, S value) { return value; });
  });
}

template <class W, class S>
inline Status place_sums_as(const PlacedJob& job, u64 key, Lanes& out) {
  Hits<W, S> hits(job);
  DR_TRY(hits.start());
  Live<W, S> live(job);
  const u64 low = job.record->low();
  W now[kBlock];
  u64 offsets[kBlock];
  DR_TRY(for_each_placed<W>(*job.record, *job.pieces, [&](const Block<W>& block) {
    hits.visit(
        block,
        [&](u32 k, u32 i, u64 place) {
          now[k] = live.read(place);
          offsets[k] = block.offsets[i];
        },
        [&](u32 n) { out = out + digest_sparse(offsets, low + block.base, now, n, key); });
  }));
  return live.check();
}

template <class W, class S>
inline Status place_preview_as(const PlacedJob& job, u64 key, Lanes& before, Lanes& after) {
  Hits<W, S> hits(job);
  DR_TRY(hits.start());
  Live<W, S> live(job);
  const u64 low = job.record->low();
  const u32 operation = Code::unpack(job.record->code).operation;
  W now[kBlock], next[kBlock];
  u64 offsets[kBlock];
  DR_TRY(for_each_placed<W>(*job.record, *job.pieces, [&](const Block<W>& block) {
    hits.visit(
        block,
        [&](u32 k, u32 i, u64 place) {
          now[k] = live.read(place);
          next[k] = updated(operation, now[k], block.values[i]);
          offsets[k] = block.offsets[i];
        },
        [&](u32 n) { digest_pair(offsets, low + block.base, now, next, n, key, before, after, [] {}); });
  }));
  return live.check();
}

// Hits by ascending position, out of boxes that are visited one after the other.
template <class W>
class HitList {
 public:
  HitList(u64 room, u64* positions, u64* offsets, u8* values)
      : room_(room), positions_(positions), offsets_(offsets), values_(values) {}

  void begin(const Block<W>& block) { __builtin_memset(hit_, 0, block.n); }

  void put(u32 i, u64 place) {
    hit_[i] = 1;
    places_[i] = place;
  }

  void end(const Block<W>& block, u64 low) {
    for (u32 i = 0; i < block.n; ++i) {
      if (hit_[i] == 0) continue;
      if (positions_ != nullptr && count_ < room_) {
        positions_[count_] = low + block.base + block.offsets[i];
        offsets_[count_] = places_[i];
        store<W>(values_ + count_ * sizeof(W), block.values[i]);
      }
      ++count_;
    }
  }

  u64 count() const { return count_; }

 private:
  u64 room_;
  u64 *positions_, *offsets_;
  u8* values_;
  u64 count_ = 0;
  u8 hit_[kBlock];
  u64 places_[kBlock];
};

template <class W>
inline Status place_decode_as(const PlacedJob& job, u64& count, u64* positions, u64* offsets, u8* values) {
  Hits<W, W> hits(job);
  DR_TRY(hits.start());
  HitList<W> list(count, positions, offsets, values);
  const u64 low = job.record->low();
  DR_TRY(for_each_placed<W>(*job.record, *job.pieces, [&](const Block<W>& block) {
    list.begin(block);
    hits.visit(block, [&](u32, u32 i, u64 place) { list.put(i, place); }, [](u32) {});
    list.end(block, low);
  }));
  if (positions != nullptr && list.count() != count)
    return wrong("slices changed during the call", count, list.count());
  count = list.count();
  return {};
}

}  // namespace deltarefit::DR_LEVEL
