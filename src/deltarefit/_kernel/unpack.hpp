// A delta's slices to blocks of positions and values, every byte checked (docs/format.md §4.6). Part of level.inl.
//
// The checks run on every pass, not only in validate: another thread may change the slices between the two, and even
// then nothing outside the array may be touched.

namespace deltarefit::DR_LEVEL {

constexpr u32 kBlock = 1024;  // a multiple of 4, so that two-bit blocks begin on a byte
constexpr u64 kSaneGap = u64(1) << 52;  // a block of gaps below this cannot overflow 64 bits

// An integer array, read from its planes and chain a block at a time.
class ArrayCursor {
 public:
  ArrayCursor() = default;

  // Takes `planes` pieces, low planes first.
  ArrayCursor(const Piece* pieces, u32 planes, u64 n) : planes_(planes), left_(n) {
    for (u32 j = 0; j + 1 < planes; ++j) low_[j] = pieces[j].data;
    if (planes != 0) {
      chain_ = pieces[planes - 1].data;
      end_ = chain_ + pieces[planes - 1].size;
    }
  }

  u64 left() const { return left_; }

  template <class T>
  Status next(u32 n, T* out) {
    if (n > left_) return wrong("array ends too early", n, left_);
    left_ -= n;
    const u32 top = planes_ - 1;
    const u64 most = top >= sizeof(T) ? 0 : u64(T(~T(0))) >> (8 * top);
    if (most >= 254 && u64(end_ - chain_) >= n && !has_255(chain_, n)) {
      const u8* chain = chain_;
      for (u32 i = 0; i < n; ++i) out[i] = T(T(chain[i]) << (8 * top));
      chain_ += n;
    } else {
      DR_TRY(next_quotients(n, most, out));
      if (top != 0 && top < sizeof(T))
        for (u32 i = 0; i < n; ++i) out[i] = T(out[i] << (8 * top));
    }
    for (u32 j = 0; j < top; ++j) DR_TRY(add_plane(j, n, out));
    return {};
  }

  Status finish() const {
    if (left_ != 0) return wrong("array has unused entries", 0, left_);
    if (chain_ != end_) return wrong("chain has unused bytes", 0, u64(end_ - chain_));
    return {};
  }

 private:
  template <class T>
  Status add_plane(u32 j, u32 n, T* out) {
    const u8* plane = low_[j];
    low_[j] += n;
    if (j < sizeof(T)) {
      for (u32 i = 0; i < n; ++i) out[i] |= T(T(plane[i]) << (8 * j));
      return {};
    }
    u8 any = 0;
    for (u32 i = 0; i < n; ++i) any |= plane[i];
    return any == 0 ? Status{} : wrong("value does not fit into its element");
  }

  template <class T>
  Status next_quotients(u32 n, u64 most, T* out) {
    constexpr u32 kStep = 64;
    for (u32 i = 0; i < n;) {
      const u32 m = n - i < kStep ? n - i : kStep;
      if (m == kStep && most >= 254 && u64(end_ - chain_) >= kStep && !has_255(chain_, kStep)) {
        for (u32 j = 0; j < kStep; ++j) out[i + j] = chain_[j];
        chain_ += kStep;
      } else {
        for (u32 j = 0; j < m; ++j) {
          u64 q = 0;
          DR_TRY(next_quotient(q));
          if (q > most) return wrong("value does not fit into its element", most, q);
          out[i + j] = T(q);
        }
      }
      i += m;
    }
    return {};
  }

  Status next_quotient(u64& q) {
    for (;;) {
      if (chain_ == end_) return wrong("chain ends too early");
      const u8 byte = *chain_++;
      q += byte;
      if (byte != 255) return {};
    }
  }

  static bool has_255(const u8* at, u32 n) {
    u64 any = 0;
    u32 i = 0;
    for (; i + 64 <= n; i += 64) any |= equal_bytes_mask(at + i, 255);
    for (; i < n; ++i) any |= at[i] == 255;
    return any != 0;
  }

  u32 planes_ = 0;
  u64 left_ = 0;
  const u8* low_[8] = {};
  const u8* chain_ = nullptr;
  const u8* end_ = nullptr;
};

inline Status check_sane(const u64* values, u32 n) {
  u64 all = 0;
  for (u32 i = 0; i < n; ++i) all |= values[i];
  return all < kSaneGap ? Status{} : wrong("position beyond the delta");
}

// Listed positions in ascending order, as `base` plus offsets that ascend within the block.
class PositionReader {
 public:
  PositionReader(const Record& record, const Code& code, const Piece* pieces)
      : kind_(code.kind), length_(record.length) {
    gaps_ = ArrayCursor(pieces, code.gap_planes, kind_ == kGaps ? record.count : record.runs);
    lengths_ = ArrayCursor(pieces + code.gap_planes, code.run_planes, record.runs);
  }

  // `offsets` is the same array in every call, of kBlock entries.
  Status next(u32 n, u64& base, u64* offsets) {
    base = next_;
    if (kind_ == kGaps) return next_single(n, offsets);
    if (kind_ == kRuns) return next_in_runs(n, base, offsets);
    if (next_ == 0)
      for (u32 i = 0; i < kBlock; ++i) offsets[i] = i;
    next_ += n;
    return {};
  }

  Status finish() const {
    if (in_run_ != 0 || taken_ != buffered_) return wrong("runs list more positions than count");
    DR_TRY(gaps_.finish());
    return lengths_.finish();
  }

 private:
  static constexpr u32 kRunBlock = 64;

  Status next_single(u32 n, u64* offsets) {
    DR_TRY(gaps_.next(n, offsets));
    DR_TRY(check_sane(offsets, n));
    u64 next = 0;
    for (u32 i = 0; i < n; ++i) {
      offsets[i] += next;
      next = offsets[i] + 1;
    }
    next_ += next;
    return next_ <= length_ ? Status{} : wrong("position beyond the delta", length_, next_ - 1);
  }

  Status next_in_runs(u32 n, u64 base, u64* offsets) {
    for (u32 i = 0; i < n;) {
      if (in_run_ == 0) DR_TRY(next_run());
      const u32 m = in_run_ < n - i ? u32(in_run_) : n - i;
      const u64 first = next_ - base;
      for (u32 j = 0; j < m; ++j) offsets[i + j] = first + j;
      next_ += m;
      in_run_ -= m;
      i += m;
    }
    return {};
  }

  Status next_run() {
    if (taken_ == buffered_) {
      const u64 left = gaps_.left();
      if (left == 0) return wrong("runs list fewer positions than count");
      buffered_ = u32(left < kRunBlock ? left : kRunBlock);
      taken_ = 0;
      DR_TRY(gaps_.next(buffered_, starts_));
      DR_TRY(lengths_.next(buffered_, spans_));
      DR_TRY(check_sane(starts_, buffered_));
      DR_TRY(check_sane(spans_, buffered_));
    }
    next_ += starts_[taken_] + (first_ ? 0 : 1);
    first_ = false;
    in_run_ = spans_[taken_++] + 1;
    return next_ + in_run_ <= length_ ? Status{} : wrong("run beyond the delta", length_, next_ + in_run_);
  }

  u32 kind_;
  u64 length_;
  ArrayCursor gaps_, lengths_;
  u64 next_ = 0;
  u64 in_run_ = 0;
  bool first_ = true;
  u32 buffered_ = 0, taken_ = 0;
  u64 starts_[kRunBlock], spans_[kRunBlock];
};

// Values as the operation takes them: XOR mask, modular difference or new value.
template <class W>
class ValueReader {
 public:
  ValueReader(const Record& record, const Code& code, const Piece* pieces)
      : operation_(code.operation), two_bit_(code.packing == kTwoBit), sparse_(code.kind != kAll) {
    if (two_bit_) {
      codes_ = pieces[0].data;
      array_ = ArrayCursor(pieces + 1, code.value_planes, record.escapes);
    } else {
      array_ = ArrayCursor(pieces, code.value_planes, record.count);
    }
  }

  Status next(u32 n, W* out) {
    if (two_bit_) {
      DR_TRY(next_codes(n, out));
    } else {
      DR_TRY(array_.next(n, out));
    }
    if (operation_ == kAdd) return to_differences(n, out);
    if (operation_ == kXor && sparse_) return check_not_zero(n, out);
    return {};
  }

  Status finish() const { return array_.finish(); }

 private:
  Status next_codes(u32 n, W* out) {
    alignas(64) u8 codes[kBlock];
    const u32 bytes = (n + 3) / 4;
    if (n % 4 != 0 && codes_[n / 4] >> (2 * (n % 4)) != 0) return wrong("padding of the two-bit codes is not zero");
    const u8* packed = codes_;
    for (u32 i = 0; i < bytes; ++i) {
      const u32 four = packed[i];
      store<u32>(codes + 4 * i, (four | four << 6 | four << 12 | four << 18) & 0x03030303u);
    }
    codes_ += bytes;
    for (u32 i = 0; i < n; ++i) out[i] = codes[i];
    __builtin_memset(codes + n, 0, kBlock - n);
    u32 escaped[kBlock + kSlack];
    u32 count = 0;
    for (u32 i = 0; i < n; i += 64) count += emit_bits(equal_bytes_mask(codes + i, 3), i, escaped + count);
    return add_escapes(escaped, count, out);
  }

  Status add_escapes(const u32* escaped, u32 count, W* out) {
    if (count == 0) return {};
    if (count > array_.left()) return wrong("more codes 3 than escapes", array_.left(), count);
    W escapes[kBlock];
    DR_TRY(array_.next(count, escapes));
    const W most = W(~W(0)) - 3;
    W above = 0;
    for (u32 i = 0; i < count; ++i) above |= W(escapes[i] > most);
    for (u32 i = 0; i < count; ++i) out[escaped[i]] = W(escapes[i] + 3);
    return above == 0 ? Status{} : wrong("escaped value does not fit into its element");
  }

  // Stored s to difference; sparse deltas store one less, so that the largest s would wrap to "no change".
  Status to_differences(u32 n, W* out) {
    const W less = sparse_ ? 1 : 0;
    W none = 0;
    for (u32 i = 0; i < n; ++i) {
      const W z = W(out[i] + less);
      none |= W(z == 0);
      out[i] = W(W(z >> 1) ^ W(W(0) - W(z & 1)));
    }
    return none == 0 || !sparse_ ? Status{} : wrong("value does not fit into its element");
  }

  static Status check_not_zero(u32 n, const W* values) {
    W zero = 0;
    for (u32 i = 0; i < n; ++i) zero |= W(values[i] == 0);
    return zero == 0 ? Status{} : wrong("XOR mask of a listed position is zero");
  }

  u32 operation_;
  bool two_bit_, sparse_;
  const u8* codes_ = nullptr;
  ArrayCursor array_;
};

// Positions base + offsets[i] and their values.
template <class W>
struct Block {
  u32 n;
  u64 index;  // of the first among the listed positions
  u64 base;
  const u64* offsets;
  const W* values;

  bool dense() const { return offsets[n - 1] - offsets[0] == n - 1; }
};

// Calls use(block) for all listed positions in order, then checks that every slice is used up.
template <class W, class Use>
inline Status for_each_block(const Record& record, const Pieces& pieces, Use use) {
  const Code code = Code::unpack(record.code);
  PositionReader position_reader(record, code, pieces.items);
  ValueReader<W> value_reader(record, code, pieces.items + code.gap_planes + code.run_planes);
  u64 base, offsets[kBlock];
  W values[kBlock];
  for (u64 done = 0; done < record.count;) {
    const u32 n = u32(record.count - done < kBlock ? record.count - done : kBlock);
    DR_TRY(position_reader.next(n, base, offsets));
    DR_TRY(value_reader.next(n, values));
    use(Block<W>{n, done, base, offsets, values});
    done += n;
  }
  DR_TRY(position_reader.finish());
  return value_reader.finish();
}

// The same with positions in the tensor, counted from the delta's first one, instead of the piece's own.
template <class W, class Use>
inline Status for_each_placed(const Record& record, const Pieces& pieces, Use use) {
  RowWalker walker(record.rows);
  const u64 low = record.low();
  u64 placed[kBlock];
  return for_each_block<W>(record, pieces, [&](Block<W> block) {
    if (!record.rows.flat()) {
      walker.place(block.offsets, record.start + block.base, block.n, low, placed);
      block.base = 0;
      block.offsets = placed;
    }
    use(block);
  });
}

}  // namespace deltarefit::DR_LEVEL
