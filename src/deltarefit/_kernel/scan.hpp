// Where two chunks of elements differ. Part of level.inl.

namespace deltarefit::DR_LEVEL {

constexpr u32 kChunk = 4096;  // elements looked at together: both sides stay in the first-level cache
constexpr u32 kSlack = 64;    // find_changed may write so many offsets beyond the last one

// changed_mask<W>(a, b): bit i says whether element i of 64 differs.
// equal_bytes_mask(at, value): bit i says whether byte i of 64 is `value`.

#if defined(__AVX512BW__)

inline __m512i load512(const u8* at) { return _mm512_loadu_si512(at); }

template <class W>
inline u64 changed_mask(const u8* a, const u8* b) {
  u64 mask = 0;
  for (u32 i = 0; i < sizeof(W); ++i) {
    const __m512i x = load512(a + 64 * i), y = load512(b + 64 * i);
    u64 part;
    if constexpr (sizeof(W) == 1) part = _mm512_cmpneq_epi8_mask(x, y);
    if constexpr (sizeof(W) == 2) part = _mm512_cmpneq_epi16_mask(x, y);
    if constexpr (sizeof(W) == 4) part = _mm512_cmpneq_epi32_mask(x, y);
    if constexpr (sizeof(W) == 8) part = _mm512_cmpneq_epi64_mask(x, y);
    mask |= part << (64 / sizeof(W) * i);
  }
  return mask;
}

inline u64 equal_bytes_mask(const u8* at, u8 value) {
  return _mm512_cmpeq_epi8_mask(load512(at), _mm512_set1_epi8(char(value)));
}

#elif defined(__AVX2__)

// All bits of each equal element.
template <class W>
inline __m256i equal256(const u8* a, const u8* b) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
  const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
  if constexpr (sizeof(W) == 1) return _mm256_cmpeq_epi8(x, y);
  if constexpr (sizeof(W) == 2) return _mm256_cmpeq_epi16(x, y);
  if constexpr (sizeof(W) == 4) return _mm256_cmpeq_epi32(x, y);
  if constexpr (sizeof(W) == 8) return _mm256_cmpeq_epi64(x, y);
}

// Mask of 32 elements. Packing works on the two halves of a register; the permutes put the order right.
template <class W>
inline u32 equal_mask32(const u8* a, const u8* b) {
  const auto equal = [&](u32 i) { return equal256<W>(a + 32 * i, b + 32 * i); };
  if constexpr (sizeof(W) == 1) return u32(_mm256_movemask_epi8(equal(0)));
  if constexpr (sizeof(W) == 2) {
    const __m256i packed = _mm256_packs_epi16(equal(0), equal(1));
    return u32(_mm256_movemask_epi8(_mm256_permute4x64_epi64(packed, 0xD8)));
  }
  if constexpr (sizeof(W) == 4) {
    const __m256i low = _mm256_packs_epi32(equal(0), equal(1)), high = _mm256_packs_epi32(equal(2), equal(3));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    return u32(_mm256_movemask_epi8(_mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order)));
  }
  u32 mask = 0;
  if constexpr (sizeof(W) == 8)
    for (u32 i = 0; i < 8; ++i) mask |= u32(_mm256_movemask_pd(_mm256_castsi256_pd(equal(i)))) << (4 * i);
  return mask;
}

template <class W>
inline u64 changed_mask(const u8* a, const u8* b) {
  return ~(u64(equal_mask32<W>(a, b)) | u64(equal_mask32<W>(a + 32 * sizeof(W), b + 32 * sizeof(W))) << 32);
}

inline u64 equal_bytes_mask(const u8* at, u8 value) {
  u8 same[64];
  __builtin_memset(same, value, 64);
  return ~changed_mask<u8>(at, same);
}

#else

// 64 bytes of 0 or 1 to bits.
inline u64 mask_of_flags(const u8* flags) {
  u64 mask = 0;
  // The product moves bit 0 of byte i to bit 56 + i.
  for (u32 i = 0; i < 8; ++i) mask |= (load<u64>(flags + 8 * i) * 0x0102040810204080ull >> 56) << (8 * i);
  return mask;
}

template <class W>
inline u64 changed_mask(const u8* a, const u8* b) {
  u8 flags[64];
  for (u32 i = 0; i < 64; ++i) flags[i] = load<W>(a + i * sizeof(W)) != load<W>(b + i * sizeof(W));
  return mask_of_flags(flags);
}

inline u64 equal_bytes_mask(const u8* at, u8 value) {
  u8 flags[64];
  for (u32 i = 0; i < 64; ++i) flags[i] = at[i] == value;
  return mask_of_flags(flags);
}

#endif

template <class W>
inline u64 changed_tail(const u8* a, const u8* b, u32 n) {
  u64 mask = 0;
  for (u32 i = 0; i < n; ++i) mask |= u64(load<W>(a + i * sizeof(W)) != load<W>(b + i * sizeof(W))) << i;
  return mask;
}

template <class W>
inline u64 count_changed_in(const u8* a, const u8* b, u64 n) {
  u64 count = 0;
  u64 i = 0;
  for (; i + 64 <= n; i += 64)
    count += u64(__builtin_popcountll(changed_mask<W>(a + i * sizeof(W), b + i * sizeof(W))));
  return count + u64(__builtin_popcountll(changed_tail<W>(a + i * sizeof(W), b + i * sizeof(W), u32(n - i))));
}

// Appends the set bits of `mask`, as base + bit, to `out` and returns how many. Few bits are set as a rule: a fixed
// number is written without asking, since a wrongly guessed branch costs more than four stores.
#if defined(__AVX512VBMI2__)

inline u32 emit_bits(u64 mask, u32 base, u32* out) {
  alignas(64) static constexpr u8 kBits[64] = {
      0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
      22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43,
      44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};
  const __m512i bits = _mm512_maskz_compress_epi8(mask, _mm512_load_si512(kBits));
  const __m512i bases = _mm512_set1_epi32(int(base));
  const u32 n = u32(__builtin_popcountll(mask));
  const auto put = [&](u32 at, __m128i part) {
    _mm512_storeu_si512(out + at, _mm512_add_epi32(_mm512_cvtepu8_epi32(part), bases));
  };
  put(0, _mm512_castsi512_si128(bits));
  if (n > 16) {
    put(16, _mm512_extracti32x4_epi32(bits, 1));
    put(32, _mm512_extracti32x4_epi32(bits, 2));
    put(48, _mm512_extracti32x4_epi32(bits, 3));
  }
  return n;
}

#else

inline u32 emit_bits(u64 mask, u32 base, u32* out) {
  if (mask == 0) return 0;
  const u32 n = u32(__builtin_popcountll(mask));
  for (u32 i = 0; i < n; i += 4) {
    for (u32 j = 0; j < 4; ++j) {
      // A mask that ran out gives bit 63; what it writes lies beyond n.
      out[i + j] = base + u32(__builtin_ctzll(mask | u64(1) << 63));
      mask &= mask - 1;
    }
  }
  return n;
}

#endif

// Asks for what follows the current chunk on both sides, a few lines at a time, while its changes are worked on:
// memory would be idle meanwhile. An address beyond the array does no harm, a prefetch never faults.
struct Ahead {
  std::uintptr_t a, b;

  Ahead(const u8* end_of_a, const u8* end_of_b)
      : a(reinterpret_cast<std::uintptr_t>(end_of_a)), b(reinterpret_cast<std::uintptr_t>(end_of_b)) {}

  void ask() {
    for (u32 line = 0; line < 4; ++line, a += 64, b += 64) {
      __builtin_prefetch(reinterpret_cast<const void*>(a));
      __builtin_prefetch(reinterpret_cast<const void*>(b));
    }
  }
};

// Ascending offsets of the differing elements among n <= kChunk; `out` has room for n + kSlack.
template <class W>
inline u32 find_changed(const u8* a, const u8* b, u32 n, u32* out) {
  u32 found = 0;
  u32 i = 0;
  for (; i + 64 <= n; i += 64)
    found += emit_bits(changed_mask<W>(a + i * sizeof(W), b + i * sizeof(W)), i, out + found);
  return found + emit_bits(changed_tail<W>(a + i * sizeof(W), b + i * sizeof(W), n - i), i, out + found);
}

}  // namespace deltarefit::DR_LEVEL
