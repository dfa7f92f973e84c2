// Additive two-lane digest (docs/format.md §5). Part of level.inl.

namespace deltarefit::DR_LEVEL {

constexpr u64 kGolden = 0x9E3779B97F4A7C15ull;
constexpr u64 kMix = 0xD6E8FEB86659FD93ull;
constexpr u64 kMix0 = 0xBF58476D1CE4E5B9ull;
constexpr u64 kMix1 = 0x94D049BB133111EBull;

inline void add_element(u64 s, u64 value, u64& lane0, u64& lane1) {
  const u64 t = s ^ value;
  u64 u = (t ^ (t >> 32)) * kMix;
  u ^= u >> 29;
  const u64 a0 = u * kMix0;
  const u64 a1 = u * kMix1;
  lane0 += a0 ^ (a0 >> 32);
  lane1 += a1 ^ (a1 >> 32);
}

// n elements that lie one behind the other, the first at position `start`.
template <class W>
inline Lanes digest_dense(const u8* values, u64 start, u64 n, u64 key) {
  u64 lane0 = 0, lane1 = 0;
  const u64 first = key + (start + 1) * kGolden;
  for (u64 i = 0; i < n; ++i) add_element(first + i * kGolden, load<W>(values + i * sizeof(W)), lane0, lane1);
  return Lanes{lane0, lane1};
}

// Values at positions start + offsets[i].
template <class W, class P>
inline Lanes digest_sparse(const P* offsets, u64 start, const W* values, u64 n, u64 key) {
  u64 lane0 = 0, lane1 = 0;
  const u64 first = key + (start + 1) * kGolden;
  for (u64 i = 0; i < n; ++i) add_element(first + offsets[i] * kGolden, values[i], lane0, lane1);
  return Lanes{lane0, lane1};
}

}  // namespace deltarefit::DR_LEVEL
