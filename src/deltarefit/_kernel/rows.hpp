// Elements of a piece to positions in its tensor. Part of level.inl.

namespace deltarefit::DR_LEVEL {

// Goes up a piece and remembers the row, so that only a step beyond the next row takes a division.
class RowWalker {
 public:
  // A single progression (rows of one element) is walked as one endless row. Of flat rows nothing may be asked.
  explicit RowWalker(const Rows& rows)
      : run_(rows.run == 1 ? kMaxElements : rows.run),
        step_(rows.run == 1 ? rows.pitch : rows.step),
        pitch_(rows.pitch),
        end_(run_),
        at_(rows.offset) {}

  u64 step() const { return step_; }

  // The position of element p; p never goes down.
  u64 at(u64 p) {
    if (p >= end_) seek(p);
    return at_ + (p - begin_) * step_;
  }

  // Elements of the row that `at(p)` found, from p on.
  u64 left(u64 p) const { return end_ - p; }

  // The positions, counted from `low`, of elements base + offsets[i], which ascend.
  template <class P>
  void place(const P* offsets, u64 base, u32 n, u64 low, u64* out) {
    for (u32 i = 0; i < n;) {
      const u64 shift = at(base + offsets[i]) - low - offsets[i] * step_;
      const u64 end = end_ - base;  // of the row, as an offset
      if (offsets[n - 1] < end) {
        for (; i < n; ++i) out[i] = shift + offsets[i] * step_;
      } else {
        do {
          out[i] = shift + offsets[i] * step_;
          ++i;
        } while (i < n && offsets[i] < end);
      }
    }
  }

 private:
  void seek(u64 p) {
    const u64 rows = p - end_ < run_ ? 1 : (p - begin_) / run_;
    begin_ += rows * run_;
    end_ = begin_ + run_;
    at_ += rows * pitch_;
  }

  u64 run_, step_, pitch_;
  u64 begin_ = 0, end_;  // elements of the current row
  u64 at_;               // position of its first one
};

}  // namespace deltarefit::DR_LEVEL
