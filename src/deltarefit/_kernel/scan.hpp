// Where two chunks of elements differ. Part of level.inl.

namespace deltarefit::DR_LEVEL {

constexpr u32 kChunk = 4096;  // elements looked at together: both sides stay in the first-level cache

// Bit i says whether element i of 64 differs.
template <class W>
inline u64 changed_mask(const u8* a, const u8* b) {
  u8 flags[64];
  for (u32 i = 0; i < 64; ++i) flags[i] = load<W>(a + i * sizeof(W)) != load<W>(b + i * sizeof(W));
  u64 mask = 0;
  // The product moves bit 0 of byte i to bit 56 + i.
  for (u32 i = 0; i < 8; ++i) mask |= (load<u64>(flags + 8 * i) * 0x0102040810204080ull >> 56) << (8 * i);
  return mask;
}

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
  for (; i + 64 <= n; i += 64) count += __builtin_popcountll(changed_mask<W>(a + i * sizeof(W), b + i * sizeof(W)));
  return count + __builtin_popcountll(changed_tail<W>(a + i * sizeof(W), b + i * sizeof(W), u32(n - i)));
}

// Append the set bits of `mask`, as base + bit, to `out`; returns how many.
inline u32 emit_bits(u64 mask, u32 base, u32* out) {
  u32 n = 0;
  for (; mask != 0; mask &= mask - 1) out[n++] = base + u32(__builtin_ctzll(mask));
  return n;
}

// Ascending offsets of the differing elements among n <= kChunk; `out` has room for kChunk + 64.
template <class W>
inline u32 find_changed(const u8* a, const u8* b, u32 n, u32* out) {
  u32 found = 0;
  u32 i = 0;
  for (; i + 64 <= n; i += 64)
    found += emit_bits(changed_mask<W>(a + i * sizeof(W), b + i * sizeof(W)), i, out + found);
  return found + emit_bits(changed_tail<W>(a + i * sizeof(W), b + i * sizeof(W), n - i), i, out + found);
}

}  // namespace deltarefit::DR_LEVEL
