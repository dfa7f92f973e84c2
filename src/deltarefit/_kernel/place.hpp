// Positions of a delta to offsets of a storage, through boxes. Part of level.inl.

namespace deltarefit::DR_LEVEL {

// The boxes that a block's positions may lie in; blocks ascend, so each box is taken up once and put away once.
class BoxesInReach {
 public:
  explicit BoxesInReach(const Boxes& boxes) : boxes_(boxes) {}

  Status start() { return list_.grow(boxes_.count * sizeof(u64), 0) ? Status{} : no_memory(); }

  // Calls use(box) for each box that reaches into the positions from `first` to `last`.
  template <class Use>
  void visit(u64 first, u64 last, Use use) {
    const Box* boxes = boxes_.items();
    u64* list = list_.as<u64>();
    while (next_ < boxes_.count && boxes[next_].low <= last) list[listed_++] = next_++;
    u64 kept = 0;
    for (u64 i = 0; i < listed_; ++i) {
      const u64 number = list[i];
      if (boxes[number].high < first) continue;
      list[kept++] = number;
      use(boxes[number]);
    }
    listed_ = kept;
  }

 private:
  const Boxes& boxes_;
  Buffer list_;
  u64 listed_ = 0, next_ = 0;
};

// What a delta lists and the boxes hold, a block at a time. S is the type of the storage's elements.
template <class W, class S>
class Hits {
 public:
  explicit Hits(const PlacedJob& job) : boxes_(*job.boxes), low_(job.record->low()), data_(job.data) {}

  Status start() { return boxes_.start(); }

  // For each box that the block hits: use(k, i, place) for its k-th hit, position i of the block, at offset `place` of
  // the storage; then flush(hits).
  template <class Use, class Flush>
  void visit(const Block<W>& block, Use use, Flush flush) {
    const u64 base = low_ + block.base;
    boxes_.visit(base + block.offsets[0], base + block.offsets[block.n - 1], [&](const Box& box) {
      const Stretch stretch = stretch_of(box, block.offsets, base, block.n);
      if (stretch.begin >= stretch.end) return;
      const u32 hits = visit_box(box, stretch, use);
      if (hits != 0) flush(hits);
    });
  }

 private:
  static constexpr u32 kAhead = 24;

  template <class Use>
  u32 visit_box(const Box& box, const Stretch& stretch, Use use) {
    if (box.digits != 0 && box.digit[box.digits - 1].stride == 1 && stretch.dense())
      return visit_runs(box, stretch, use);
    if (box.unbroken()) return visit_unbroken(box, stretch, use);
    const u32 n = find_hits(box, stretch, found_);
    const u64* places = found_.places;
    const u32* indices = found_.indices;
    for (u32 k = 0; k < n; ++k) {
      prefetch(places[indices[k + kAhead < n ? k + kAhead : n - 1]]);
      use(k, stretch.begin + indices[k], places[indices[k]]);
    }
    return n;
  }

  template <class Use>
  u32 visit_unbroken(const Box& box, const Stretch& stretch, Use use) {
    const u64 step = box.step(), origin = box.storage + (stretch.base - box.low) * step;
    const u64* offsets = stretch.offsets;
    for (u32 i = stretch.begin; i < stretch.end; ++i) {
      prefetch(origin + offsets[i + kAhead < stretch.end ? i + kAhead : stretch.end - 1] * step);
      use(i - stretch.begin, i, origin + offsets[i] * step);
    }
    return stretch.end - stretch.begin;
  }

  template <class Use>
  u32 visit_runs(const Box& box, const Stretch& stretch, Use use) {
    const u64 first = stretch.position(stretch.begin) - box.low, step = box.step();
    u32 k = 0;
    for_each_run(box, first, first + (stretch.end - stretch.begin), [&](u64 at, u64 n, u64 place) {
      const u32 i = stretch.begin + u32(at - first), m = u32(n);
      if (step == 1)
        for (u32 j = 0; j < m; ++j) use(k + j, i + j, place + j);
      else
        for (u32 j = 0; j < m; ++j) use(k + j, i + j, place + j * step);
      k += m;
    });
    return k;
  }

  // Hardware only sees the next line coming where changes are dense.
  void prefetch(u64 place) const {
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(data_) + place * sizeof(S)), 1);
  }

  BoxesInReach boxes_;
  u64 low_;
  const u8* data_;
  Found found_;
};

// Live elements of a storage. Where they are widened, remembers whether a lower half was not zero.
template <class W, class S>
class Live {
 public:
  explicit Live(const PlacedJob& job) : data_(job.data) {}

  static constexpr u32 kShift = 8 * (sizeof(S) - sizeof(W));

  W read(u64 place) {
    const S raw = load<S>(data_ + place * sizeof(S));
    if constexpr (kShift != 0) lower_ |= raw & ((S(1) << kShift) - 1);
    return W(raw >> kShift);
  }

  Status check() const { return lower_ == 0 ? Status{} : wrong("lower half of a widened element is not zero"); }

 private:
  const u8* data_;
  S lower_ = 0;
};

}  // namespace deltarefit::DR_LEVEL
