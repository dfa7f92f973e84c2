// Which of ascending positions a box holds, and where. Part of level.inl.

namespace deltarefit::DR_LEVEL {

// Ascending positions base + offsets[begin] to base + offsets[end - 1], all between a box's first and last.
struct Stretch {
  const u64* offsets;
  u64 base;
  u32 begin, end;

  u64 position(u32 i) const { return base + offsets[i]; }
  bool dense() const { return offsets[end - 1] - offsets[begin] == end - 1 - begin; }
};

// The first of ascending offsets, among the first n, that is not below `least`.
inline u32 lower_bound(const u64* offsets, u32 n, u64 least) {
  u32 begin = 0;
  while (n > 0) {
    const u32 half = n / 2;
    const bool below = offsets[begin + half] < least;
    begin += below ? half + 1 : 0;
    n = below ? n - half - 1 : half;
  }
  return begin;
}

// The part of n positions that lies between a box's first and last.
inline Stretch stretch_of(const Box& box, const u64* offsets, u64 base, u32 n) {
  Stretch out{offsets, base, 0, n};
  if (out.position(0) < box.low) out.begin = lower_bound(offsets, n, box.low - base);
  if (out.position(n - 1) > box.high) out.end = box.high < base ? 0 : lower_bound(offsets, n, box.high - base + 1);
  return out;
}

// For each position of a stretch: is it in the box, and its storage offset if it is; the indices of those that are.
struct Found {
  alignas(64) u8 hit[kBlock];
  u64 places[kBlock];
  u32 indices[kBlock + kSlack];
};

// Digit by digit, in a box with kDigits digits (0: as many as it has). kUnit: the innermost stride is 1.
template <u32 kDigits, bool kUnit>
inline void find_wide(const Box& box, const Stretch& stretch, Found& found) {
  const u32 digits = kDigits == 0 ? box.digits : kDigits;
  const u64 from = stretch.base - box.low;
  for (u32 i = stretch.begin; i < stretch.end; ++i) {
    u64 rest = from + stretch.offsets[i], place = box.storage;
    bool hit = true;
    for (u32 d = 0; d < digits - kUnit; ++d) {
      const u64 value = box.digit[d].split(rest);
      hit &= value < box.digit[d].size;
      place += value * box.digit[d].storage;
    }
    if constexpr (kUnit) {
      hit &= rest < box.digit[digits - 1].size;
      place += rest * box.digit[digits - 1].storage;
    } else {
      hit &= rest == 0;
    }
    found.hit[i - stretch.begin] = hit;
    found.places[i - stretch.begin] = place;
  }
}

// Whether a stretch, counted from a multiple of the outermost stride, fits into 32 bits.
inline bool is_narrow(const Box& box, const Stretch& stretch) {
  const u64 stride = box.digit[0].stride, span = stretch.offsets[stretch.end - 1] - stretch.offsets[stretch.begin];
  return stride < (u64(1) << 31) && span < (u64(1) << 31);
}

// The same with products of 32 bits, which compilers turn into vectors.
template <u32 kDigits, bool kUnit>
inline void find_narrow(const Box& box, const Stretch& stretch, Found& found) {
  Digit digit[kDigits];  // a copy, which no store below can change
  for (u32 d = 0; d < kDigits; ++d) digit[d] = box.digit[d];
  const u64* __restrict offsets = stretch.offsets + stretch.begin;
  u64* __restrict places = found.places;
  u8* __restrict hits = found.hit;
  u64 first = stretch.position(stretch.begin) - box.low;
  const u64 storage = box.storage + digit[0].split(first) * digit[0].storage;
  const u64 from = first - offsets[0];
  const u32 n = stretch.end - stretch.begin;
  for (u32 i = 0; i < n; ++i) {
    u64 rest = from + offsets[i], place = storage, outside = 0;
    for (u32 d = 0; d < kDigits - kUnit; ++d) {
      u64 value = u64(u32(rest)) * u64(u32(digit[d].short_reciprocal)) >> digit[d].short_shift;
      rest -= u64(u32(value)) * u64(u32(digit[d].stride));
      // All ones where one more fits: numbers are far below 2^63, so that differences tell by their sign.
      const u64 more = ~u64(i64(rest - digit[d].stride) >> 63);
      rest -= digit[d].stride & more;
      value -= more;
      if (d > 0) outside |= digit[d].size - 1 - value;
      place += value * digit[d].storage;
    }
    if constexpr (kUnit) {
      outside |= digit[kDigits - 1].size - 1 - rest;
      place += rest * digit[kDigits - 1].storage;
    } else {
      outside |= u64(0) - rest;
    }
    hits[i] = u8(~outside >> 63);
    places[i] = place;
  }
}

template <u32 kDigits, bool kUnit>
inline void find(const Box& box, const Stretch& stretch, Found& found) {
  if (is_narrow(box, stretch)) find_narrow<kDigits, kUnit>(box, stretch, found);
  else find_wide<kDigits, kUnit>(box, stretch, found);
}

// Finds the hits of a stretch in a box and says how many they are.
inline u32 find_hits(const Box& box, const Stretch& stretch, Found& found) {
  const bool unit = box.digit[box.digits - 1].stride == 1;
  if (box.digits == 1) find<1, false>(box, stretch, found);
  else if (box.digits == 2 && unit) find<2, true>(box, stretch, found);
  else if (box.digits == 2) find<2, false>(box, stretch, found);
  else if (box.digits == 3 && unit) find<3, true>(box, stretch, found);
  else if (box.digits == 4 && unit) find<4, true>(box, stretch, found);
  else find_wide<0, false>(box, stretch, found);
  const u32 n = stretch.end - stretch.begin, whole = (n + 63) / 64 * 64;
  __builtin_memset(found.hit + n, 0, whole - n);
  u32 hits = 0;
  for (u32 i = 0; i < whole; i += 64) hits += emit_bits(equal_bytes_mask(found.hit + i, 1), i, found.indices + hits);
  return hits;
}

// Calls run(at, n, place) for each run of positions, one behind the other, of a box whose innermost stride is 1.
// `begin`, `end` and `at` are counted from the box's first position.
template <class Run>
inline void for_each_run(const Box& box, u64 begin, u64 end, Run run) {
  const u32 last = box.digits - 1;
  const Digit& inner = box.digit[last];
  for (u64 at = begin; at < end;) {
    // `next`: how far it is to the next value of one of the digits so far, whose strides need not divide each other.
    u64 rest = at, place = box.storage, skip = 0, next = end - at;
    for (u32 d = 0; d < last && skip == 0; ++d) {
      const u64 value = box.digit[d].split(rest);
      if (value >= box.digit[d].size) skip = next;
      place += value * box.digit[d].storage;
      const u64 left = box.digit[d].stride - rest;
      if (left < next) next = left;
    }
    if (skip == 0 && rest >= inner.size) skip = next;
    if (skip == 0) {
      skip = inner.size - rest < end - at ? inner.size - rest : end - at;
      run(at, skip, place + rest * inner.storage);
    }
    at += skip;
  }
}

}  // namespace deltarefit::DR_LEVEL
