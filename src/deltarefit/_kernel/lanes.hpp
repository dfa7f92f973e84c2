// Vectors of 64-bit integers for the digest: eight, four or one lane. Part of level.inl.

namespace deltarefit::DR_LEVEL {

#if defined(__AVX512DQ__)

struct V64 {
  static constexpr u32 kLanes = 8;
  __m512i v;

  static V64 all(u64 x) { return {_mm512_set1_epi64(i64(x))}; }
  static V64 iota() { return {_mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7)}; }
  template <class T>
  static V64 widened(const u8* at) {
    if constexpr (sizeof(T) == 1) return {_mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)))};
    if constexpr (sizeof(T) == 2) return {_mm512_cvtepu16_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)))};
    if constexpr (sizeof(T) == 4)
      return {_mm512_cvtepu32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)))};
    if constexpr (sizeof(T) == 8) return {_mm512_loadu_si512(at)};
  }
  u64 sum() const {
    u64 lanes[kLanes], total = 0;
    _mm512_storeu_si512(lanes, v);
    for (u64 lane : lanes) total += lane;
    return total;
  }
};

inline V64 operator+(V64 a, V64 b) { return {_mm512_add_epi64(a.v, b.v)}; }
inline V64 operator^(V64 a, V64 b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <u32 n>
inline V64 shifted_right(V64 a) {
  return {_mm512_srli_epi64(a.v, n)};
}

// A constant to multiply with.
struct Factor {
  __m512i c;
  explicit Factor(u64 x) : c(_mm512_set1_epi64(i64(x))) {}
};
inline V64 operator*(V64 a, const Factor& f) { return {_mm512_mullo_epi64(a.v, f.c)}; }

#elif defined(__AVX2__)

struct V64 {
  static constexpr u32 kLanes = 4;
  __m256i v;

  static V64 all(u64 x) { return {_mm256_set1_epi64x(i64(x))}; }
  static V64 iota() { return {_mm256_setr_epi64x(0, 1, 2, 3)}; }
  template <class T>
  static V64 widened(const u8* at) {
    if constexpr (sizeof(T) == 1) return {_mm256_cvtepu8_epi64(_mm_cvtsi32_si128(int(load<u32>(at))))};
    if constexpr (sizeof(T) == 2) return {_mm256_cvtepu16_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)))};
    if constexpr (sizeof(T) == 4) return {_mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)))};
    if constexpr (sizeof(T) == 8) return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))};
  }
  u64 sum() const {
    const __m128i half = _mm_add_epi64(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    return u64(_mm_cvtsi128_si64(half)) + u64(_mm_extract_epi64(half, 1));
  }
};

inline V64 operator+(V64 a, V64 b) { return {_mm256_add_epi64(a.v, b.v)}; }
inline V64 operator^(V64 a, V64 b) { return {_mm256_xor_si256(a.v, b.v)}; }
template <u32 n>
inline V64 shifted_right(V64 a) {
  return {_mm256_srli_epi64(a.v, n)};
}

struct Factor {
  __m256i low, high;
  explicit Factor(u64 x) : low(_mm256_set1_epi64x(i64(x))), high(_mm256_set1_epi64x(i64(x >> 32))) {}
};

// The product's low 64 bits from 32-bit products; the shuffle (another port than shifts) brings the high halves down.
inline V64 operator*(V64 a, const Factor& f) {
  const __m256i upper = _mm256_shuffle_epi32(a.v, 0xF5);
  const __m256i cross = _mm256_add_epi64(_mm256_mul_epu32(upper, f.low), _mm256_mul_epu32(a.v, f.high));
  return {_mm256_add_epi64(_mm256_mul_epu32(a.v, f.low), _mm256_slli_epi64(cross, 32))};
}

#else

struct V64 {
  static constexpr u32 kLanes = 1;
  u64 v;

  static V64 all(u64 x) { return {x}; }
  static V64 iota() { return {0}; }
  template <class T>
  static V64 widened(const u8* at) {
    return {load<T>(at)};
  }
  u64 sum() const { return v; }
};

inline V64 operator+(V64 a, V64 b) { return {a.v + b.v}; }
inline V64 operator^(V64 a, V64 b) { return {a.v ^ b.v}; }
template <u32 n>
inline V64 shifted_right(V64 a) {
  return {a.v >> n};
}

struct Factor {
  u64 c;
  explicit Factor(u64 x) : c(x) {}
};
inline V64 operator*(V64 a, const Factor& f) { return {a.v * f.c}; }

#endif

}  // namespace deltarefit::DR_LEVEL
