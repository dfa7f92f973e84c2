// Integers to byte planes and chains, values to two-bit codes (docs/format.md §4.2, §4.4). Part of level.inl.

namespace deltarefit::DR_LEVEL {

// The part of `value` that the chain carries when there are `planes` planes.
template <class T>
inline T quotient(T value, u32 planes) {
  const u32 shift = 8 * (planes - 1);
  return shift >= 8 * sizeof(T) ? T(0) : T(value >> shift);
}

// Quotients of 64 integers as bytes, 255 for all above 254; returns which are.
template <class T>
inline u64 saturated(const T* values, u32 planes, u8* out) {
  for (u32 i = 0; i < 64; ++i) {
    const T q = quotient(values[i], planes);
    out[i] = u8(q < 255 ? q : T(255));
  }
  return equal_bytes_mask(out, 255);
}

// Bytes of a chain beyond one per integer; stops counting above the largest piece, so that nothing overflows.
template <class T>
inline u64 chain_extra(const T* values, u64 n, u32 planes) {
  u64 extra = 0;
  u8 bytes[64];
  for (u64 i = 0; i < n && extra <= kMaxPieceBytes; i += 64) {
    const u64 m = n - i < 64 ? n - i : 64;
    if (m == 64 && saturated(values + i, planes, bytes) == 0) continue;
    for (u64 j = 0; j < m; ++j) extra += quotient(values[i + j], planes) / 255;
  }
  return extra;
}

template <class T>
inline void pack_plane(const T* values, u64 n, u32 plane, u8* out) {
  const u32 shift = 8 * plane;
  if (shift >= 8 * sizeof(T)) {
    __builtin_memset(out, 0, n);
    return;
  }
  for (u64 i = 0; i < n; ++i) out[i] = u8(values[i] >> shift);
}

// Returns the end of what was written, or null when it would not fit before `end`: then the values are not those that
// the chain was measured with (a caller's array that another thread writes to).
template <class T>
inline u8* pack_chain(const T* values, u64 n, u32 planes, u8* out, const u8* end) {
  for (u64 i = 0; i < n;) {
    if (n - i >= 64 && end - out >= 64 && saturated(values + i, planes, out) == 0) {
      out += 64;
      i += 64;
      continue;
    }
    for (const u64 stop = n - i < 64 ? n : i + 64; i < stop; ++i) {
      const u64 q = quotient(values[i], planes);
      const u64 full = q / 255;
      if (full >= u64(end - out)) return nullptr;
      if (full != 0) __builtin_memset(out, 255, full);
      out += full;
      *out++ = u8(q - 255 * full);
    }
  }
  return out;
}

// All planes of an array, one behind the other, the chain of `chain_bytes` last; false as for pack_chain. A part of the
// values goes to all planes while it is in the first-level cache.
template <class T>
inline bool pack_array(const T* values, u64 n, u32 planes, u64 chain_bytes, u8* out) {
  constexpr u64 kPart = 4096;
  u8* chain = out + n * (planes - 1);
  const u8* end = chain + chain_bytes;
  for (u64 i = 0; i < n && chain != nullptr; i += kPart) {
    const u64 m = n - i < kPart ? n - i : kPart;
    for (u32 plane = 0; plane + 1 < planes; ++plane) pack_plane(values + i, m, plane, out + n * plane + i);
    chain = pack_chain(values + i, m, planes, chain, end);
  }
  return chain == end;
}

// Two-bit codes of n values to ceil(n / 4) bytes; what exceeds code 2 goes to `escapes` less 3. Returns how many do.
template <class W>
inline u64 pack_two_bit(const W* values, u64 n, u8* out, W* escapes) {
  u64 escaped = 0;
  for (u64 i = 0; i < n; i += 64, values += 64) {
    u8 codes[64] = {};
    u32 at[64 + kSlack];
    const u32 m = n - i < 64 ? u32(n - i) : 64;
    for (u32 j = 0; j < m; ++j) codes[j] = u8(values[j] < 3 ? values[j] : W(3));
    for (u32 j = 0; j < (m + 3) / 4; ++j) {
      const u32 four = load<u32>(codes + 4 * j);
      out[j] = u8(four | four >> 6 | four >> 12 | four >> 18);
    }
    out += (m + 3) / 4;
    const u32 found = emit_bits(equal_bytes_mask(codes, 3), 0, at);
    for (u32 j = 0; j < found; ++j) escapes[escaped + j] = W(values[at[j]] - 3);
    escaped += found;
  }
  return escaped;
}

// Differences as stored (docs/format.md §4.4): `sparse` deltas never hold 0 and store one less.
template <class W>
inline W stored_difference(W older, W newer, W sparse) {
  const W d = W(newer - older);
  const W sign = W(0) - W(d >> (8 * sizeof(W) - 1));
  return W(W(W(d << 1) ^ sign) - sparse);
}

template <class W>
inline void stored_values(u32 operation, bool sparse, const W* olds, const W* news, u64 n, W* out) {
  const W less = W(sparse ? 1 : 0);
  if (operation == kXor) {
    for (u64 i = 0; i < n; ++i) out[i] = W(olds[i] ^ news[i]);
  } else if (operation == kAdd) {
    for (u64 i = 0; i < n; ++i) out[i] = stored_difference(olds[i], news[i], less);
  } else {
    __builtin_memcpy(out, news, n * sizeof(W));
  }
}

// Gaps of single positions to gaps and lengths-minus-one of runs; returns the number of runs.
template <class G>
inline u64 runs_of_gaps(const G* gaps, u64 n, G* run_gaps, G* run_lengths) {
  u64 runs = 0;
  for (u64 i = 0; i < n; ++i) {
    if (i == 0 || gaps[i] != 0) {
      run_gaps[runs] = runs == 0 ? gaps[i] : G(gaps[i] - 1);
      run_lengths[runs++] = 0;
    } else {
      ++run_lengths[runs - 1];
    }
  }
  return runs;
}

}  // namespace deltarefit::DR_LEVEL
