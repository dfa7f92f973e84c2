// Digest of all that boxes hold of a storage. Part of level.inl.

namespace deltarefit::DR_LEVEL {

// Digits from the largest storage stride to the smallest, so that memory is read as it lies; those that go down are
// turned round, so that storage strides are not negative. Canonical strides may then be (as two's complement).
struct Scan {
  u64 position, place;
  u32 digits;
  Digit digit[kMaxDigits];
};

inline void scan_of(const Box& box, Scan& out) {
  out.position = box.low;
  out.place = box.storage;
  out.digits = box.digits;
  for (u32 d = 0; d < box.digits; ++d) {
    Digit digit = box.digit[d];
    if (i64(digit.storage) < 0) {
      out.position += (digit.size - 1) * digit.stride;
      out.place += (digit.size - 1) * digit.storage;
      digit.stride = u64(0) - digit.stride;
      digit.storage = u64(0) - digit.storage;
    }
    u32 to = d;
    for (; to > 0 && out.digit[to - 1].storage < digit.storage; --to) out.digit[to] = out.digit[to - 1];
    out.digit[to] = digit;
  }
}

template <class W, class S>
class BoxDigest {
 public:
  BoxDigest(const PlacedJob& job, u64 key) : data_(job.data), live_(job), key_(key) {}

  void add(const Box& box) {
    Scan scan;
    scan_of(box, scan);
    if (scan.digits == 0) {
      sum_.add_one(key_ + (scan.position + 1) * kGolden, live_.read(scan.place));
      return;
    }
    const u32 last = scan.digits - 1;
    const bool long_rows = scan.digit[last].size >= kLongRow;
    u64 at[kMaxDigits] = {};
    do {
      if (long_rows) add_row(scan.digit[last], scan.position, scan.place);
      else add_few(scan.digit[last], scan.position, scan.place);
    } while (next_row(scan, at, last));
  }

  Status finish(Lanes& out) {
    flush();
    out = out + sum_.total() + rest_;
    return live_.check();
  }

 private:
  static constexpr u64 kLongRow = 16;

  // Steps to the next row; false after the last one.
  static bool next_row(Scan& scan, u64* at, u32 last) {
    for (u32 d = last; d-- > 0;) {
      const Digit& digit = scan.digit[d];
      scan.position += digit.stride;
      scan.place += digit.storage;
      if (++at[d] < digit.size) return true;
      scan.position -= digit.size * digit.stride;
      scan.place -= digit.size * digit.storage;
      at[d] = 0;
    }
    return false;
  }

  void add_row(const Digit& row, u64 position, u64 place) {
    if (row.storage == 1 && sizeof(W) == sizeof(S)) {
      add_progression<W>(sum_, data_ + place * sizeof(S), position, row.stride, row.size, key_);
      return;
    }
    W values[kBlock];
    for (u64 done = 0; done < row.size;) {
      const u64 n = row.size - done < kBlock ? row.size - done : kBlock;
      for (u64 j = 0; j < n; ++j) values[j] = live_.read(place + (done + j) * row.storage);
      add_progression<W>(sum_, reinterpret_cast<const u8*>(values), position + done * row.stride, row.stride, n, key_);
      done += n;
    }
  }

  // Rows that are too short for vectors: their elements are collected.
  void add_few(const Digit& row, u64 position, u64 place) {
    if (few_ + row.size > kBlock) flush();
    for (u64 j = 0; j < row.size; ++j, ++few_) {
      positions_[few_] = position + j * row.stride;
      values_[few_] = live_.read(place + j * row.storage);
    }
  }

  void flush() {
    rest_ = rest_ + digest_sparse(positions_, 0, values_, few_, key_);
    few_ = 0;
  }

  const u8* data_;
  Live<W, S> live_;
  u64 key_;
  DigestSum sum_;
  Lanes rest_;
  u64 few_ = 0;
  u64 positions_[kBlock];
  W values_[kBlock];
};

template <class W, class S>
inline Status place_digest_as(const PlacedJob& job, u64 key, Lanes& out) {
  BoxDigest<W, S> digest(job, key);
  for (u64 i = 0; i < job.boxes->count; ++i) digest.add(job.boxes->items()[i]);
  return digest.finish(out);
}

}  // namespace deltarefit::DR_LEVEL
