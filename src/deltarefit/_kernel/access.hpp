// Reading and writing elements of arrays of any strides and alignment. Part of level.inl.

namespace deltarefit::DR_LEVEL {

// Arrays out of files may lie at odd addresses: every access goes through memcpy, which compiles to one move.
template <class W>
inline W load(const u8* at) {
  W value;
  __builtin_memcpy(&value, at, sizeof value);
  return value;
}

template <class W>
inline void store(u8* at, W value) {
  __builtin_memcpy(at, &value, sizeof value);
}

// Elements of a view in canonical order, a chunk at a time.
//
// Where memory runs along the last but one dimension (a transposed matrix), a row touches one cache line per element,
// and the next rows touch the same lines again: rows are fetched as many together as a line holds.
template <class W>
class Reader {
 public:
  explicit Reader(const View& view) : view_(view), row_(view.data) {
    for (u32 d = 0; d < view.dims; ++d) index_[d] = 0;
    if (view.dims >= 2) choose_tile();
  }

  // The next n elements: a pointer into the array itself, or to `buffer`, which gets a copy.
  const u8* next(u64 n, u8* buffer) {
    if (view_.contiguous()) {
      const u8* at = row_;
      row_ += n * sizeof(W);
      return at;
    }
    for (u64 done = 0; done < n;) done += copy_row_part(buffer + done * sizeof(W), n - done);
    return buffer;
  }

 private:
  static constexpr u64 kLine = 64;
  static constexpr u64 kMostTileBytes = u64(32) << 20;

  static u64 distance(i64 stride) { return stride < 0 ? u64(0) - u64(stride) : u64(stride); }

  void choose_tile() {
    const u32 inner = view_.dims - 1;
    const u64 across = distance(view_.stride[inner]), down = distance(view_.stride[inner - 1]);
    if (across < kLine || down * 2 > kLine || view_.size[inner] > kMostTileBytes / kLine) return;
    pitch_ = view_.size[inner] * sizeof(W) + kLine;  // the line more keeps rows out of each other's cache sets
    most_rows_ = down <= sizeof(W) ? kLine / sizeof(W) : kLine / down;
    if (most_rows_ > view_.size[inner - 1]) most_rows_ = view_.size[inner - 1];
    if (!tile_.grow(most_rows_ * pitch_, 0)) most_rows_ = 0;
  }

  // The next rows of one outer index, from the one at row_ on.
  void fetch_tile() {
    const u32 inner = view_.dims - 1;
    const u64 left = view_.size[inner - 1] - index_[inner - 1];
    tile_rows_ = left < most_rows_ ? left : most_rows_;
    tile_row_ = 0;
    const i64 across = view_.stride[inner], down = view_.stride[inner - 1];
    for (u64 column = 0; column < view_.size[inner]; ++column) {
      const u8* from = row_ + i64(column) * across;
      __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(from) + u64(across) * 16));
      u8* to = tile_.data() + column * sizeof(W);
      for (u64 r = 0; r < tile_rows_; ++r) store<W>(to + r * pitch_, load<W>(from + i64(r) * down));
    }
  }

  u64 copy_row_part(u8* to, u64 wanted) {
    const u32 inner = view_.dims - 1;
    const u64 left = view_.size[inner] - index_[inner];
    const u64 n = wanted < left ? wanted : left;
    if (most_rows_ != 0) {
      if (tile_row_ == tile_rows_) fetch_tile();
      __builtin_memcpy(to, tile_.data() + tile_row_ * pitch_ + index_[inner] * sizeof(W), n * sizeof(W));
    } else {
      copy_strided(to, row_ + i64(index_[inner]) * view_.stride[inner], n);
    }
    index_[inner] += n;
    if (index_[inner] == view_.size[inner]) next_row();
    return n;
  }

  void copy_strided(u8* to, const u8* from, u64 n) {
    const i64 stride = view_.stride[view_.dims - 1];
    if (stride == i64(sizeof(W))) {
      __builtin_memcpy(to, from, n * sizeof(W));
    } else {
      for (u64 i = 0; i < n; ++i) store<W>(to + i * sizeof(W), load<W>(from + i64(i) * stride));
    }
  }

  void next_row() {
    ++tile_row_;
    index_[view_.dims - 1] = 0;
    for (u32 d = view_.dims - 1; d-- > 0;) {
      if (++index_[d] < view_.size[d]) {
        row_ += view_.stride[d];
        return;
      }
      row_ -= view_.stride[d] * i64(view_.size[d] - 1);
      index_[d] = 0;
    }
  }

  const View& view_;
  const u8* row_;
  u64 index_[kMaxDims];
  Buffer tile_;
  u64 pitch_ = 0, most_rows_ = 0;      // no rows: no tile
  u64 tile_rows_ = 0, tile_row_ = 0;  // fetched, and the current one among them
};

// Addresses of ascending canonical indices; remembers the row, so that most steps are one multiplication.
class Walker {
 public:
  explicit Walker(const View& view) : view_(view) {
    inner_ = view.dims == 0 ? 1 : view.size[view.dims - 1];
    stride_ = view.dims == 0 ? 0 : view.stride[view.dims - 1];
  }

  u8* at(u64 index) {
    if (index >= row_end_ || index < row_begin_) seek(index);
    return row_ + i64(index - row_begin_) * stride_;
  }

 private:
  void seek(u64 index) {
    u64 row = index / inner_;
    row_begin_ = row * inner_;
    row_end_ = row_begin_ + inner_;
    row_ = view_.data;
    for (u32 d = view_.dims < 2 ? 0 : view_.dims - 1; d-- > 0;) {
      row_ += i64(row % view_.size[d]) * view_.stride[d];
      row /= view_.size[d];
    }
  }

  const View& view_;
  u64 inner_;
  i64 stride_;
  u64 row_begin_ = 0;
  u64 row_end_ = 0;
  u8* row_ = nullptr;
};

}  // namespace deltarefit::DR_LEVEL
