// Choice of an encoding by estimated compressed size. Part of level.inl.
//
// zstd codes bytes with Huffman codes: at least a bit a byte, unless a stream is so uneven that its match search
// finds long repeats; there the entropy itself is the better guess.

namespace deltarefit::DR_LEVEL {

constexpr u64 kSample = 16384;      // changes looked at
constexpr u64 kSampleRun = 1024;    // taken in pieces of so many, evenly spread
constexpr double kNearlyConstant = 0.2;
constexpr double kNever = 1e300;

struct Choice {
  u32 planes = 1;
  double bits = kNever;
};

// log2 with an error below 2e-5.
inline double log2_of(u64 n) {
  const double value = double(n);
  u64 bits;
  __builtin_memcpy(&bits, &value, 8);
  const double exponent = double(i64(bits >> 52) - 1023);
  bits = (bits & 0x000FFFFFFFFFFFFFull) | 0x3FF0000000000000ull;
  double m;
  __builtin_memcpy(&m, &bits, 8);
  const double t = (m - 1) / (m + 1), tt = t * t;
  return exponent + 2.8853900817779268 * t * (1 + tt * (1.0 / 3 + tt * (0.2 + tt * (1.0 / 7))));
}

// Estimated bits of a stream with this histogram of n bytes.
inline double stream_bits(const u32* histogram, u64 n) {
  if (n == 0) return 0;
  double sum = 0;
  u32 symbols = 0;
  for (u32 i = 0; i < 256; ++i) {
    if (histogram[i] == 0) continue;
    ++symbols;
    sum += histogram[i] * log2_of(histogram[i]);
  }
  // Small samples look too even; this is the usual first correction of their entropy (in bits).
  const double entropy = double(n) * log2_of(n) - sum + 0.72 * (symbols - 1);
  if (entropy < kNearlyConstant * double(n)) return entropy;
  return entropy > double(n) ? entropy : double(n);
}

template <class T>
inline double plane_bits(const T* values, u64 n, u32 plane) {
  u32 histogram[256] = {};
  for (u64 i = 0; i < n; ++i) ++histogram[u8(values[i] >> (8 * plane))];
  return stream_bits(histogram, n);
}

template <class T>
inline double chain_bits(const T* values, u64 n, u32 planes) {
  const u64 extra = chain_extra(values, n, planes);
  if (extra > 8 * n + 64) return kNever;
  u32 histogram[256] = {};
  for (u64 i = 0; i < n; ++i) ++histogram[u64(quotient(values[i], planes)) % 255];
  // 255 itself only stands for "more"; q mod 255 never gives it.
  histogram[255] = u32(extra);
  return stream_bits(histogram, n + extra);
}

template <class T>
inline u32 bytes_needed(const T* values, u64 n) {
  T all = 0;
  for (u64 i = 0; i < n; ++i) all |= values[i];
  u32 bytes = 1;
  for (u64 rest = u64(all) >> 8; rest != 0; rest >>= 8) ++bytes;
  return bytes;
}

// The best number of planes for a sample, or the cost of the forced one.
template <class T>
inline Choice choose_planes(const T* values, u64 n, int forced) {
  Choice best;
  if (n == 0) return Choice{1, 0};
  const u32 needed = bytes_needed(values, n);
  double low_bits = 0;
  for (u32 planes = 1; planes <= needed; ++planes) {
    const double bits = low_bits + chain_bits(values, n, planes);
    if (bits < best.bits) best = Choice{planes, bits};
    if (planes < needed) low_bits += plane_bits(values, n, planes - 1);
  }
  if (forced > 0) best.planes = u32(forced);
  return best;
}

// Offset of piece k of the sample of n things, and how many it has; the sample has sample_pieces(n) pieces.
inline u64 sample_pieces(u64 n) { return n <= kSample ? 1 : kSample / kSampleRun; }
inline u64 sample_offset(u64 n, u64 k) { return n <= kSample ? 0 : (n - kSampleRun) / (kSample / kSampleRun - 1) * k; }
inline u64 sample_length(u64 n) { return n <= kSample ? n : kSampleRun; }

template <class W>
inline u64 sample_values(u32 operation, bool sparse, const W* olds, const W* news, u64 n, W* out) {
  u64 taken = 0;
  for (u64 k = 0; k < sample_pieces(n); ++k, taken += sample_length(n)) {
    const u64 at = sample_offset(n, k);
    stored_values(operation, sparse, olds + at, news + at, sample_length(n), out + taken);
  }
  return taken;
}

template <class G>
inline u64 sample_gaps(const G* gaps, u64 n, G* out) {
  u64 taken = 0;
  for (u64 k = 0; k < sample_pieces(n); ++k, taken += sample_length(n))
    __builtin_memcpy(out + taken, gaps + sample_offset(n, k), sample_length(n) * sizeof(G));
  return taken;
}

struct ValuePlan {
  u32 operation = kXor;
  u32 packing = kPlanes;
  u32 planes = 1;
  double bits = kNever;
};

// Cost of two-bit codes for stored differences. `escapes` has room for n.
template <class W>
inline Choice two_bit_cost(const W* stored, u64 n, u8* codes, W* escapes) {
  const u64 escaped = pack_two_bit(stored, n, codes, escapes);
  Choice choice = choose_planes(escapes, escaped, -1);
  u32 histogram[256] = {};
  for (u64 i = 0; i < (n + 3) / 4; ++i) ++histogram[codes[i]];
  choice.bits += stream_bits(histogram, (n + 3) / 4);
  return choice;
}

// Operation, packing and planes of the values. `work` has room for kSample * (2 * sizeof(W) + 1) bytes.
template <class W>
inline ValuePlan choose_values(const W* olds, const W* news, u64 n, bool sparse, int operation, int packing, u8* work) {
  W* stored = reinterpret_cast<W*>(work);
  W* escapes = stored + kSample;
  u8* codes = reinterpret_cast<u8*>(escapes + kSample);
  ValuePlan best;
  const auto consider = [&](u32 op, u32 pack, Choice choice) {
    if (choice.bits < best.bits || best.bits == kNever) best = ValuePlan{op, pack, choice.planes, choice.bits};
  };
  if (operation == int(kSet)) {
    const u64 taken = sample_values(kSet, sparse, olds, news, n, stored);
    consider(kSet, kPlanes, choose_planes(stored, taken, -1));
  }
  if (operation != int(kXor) && operation != int(kSet)) {
    const u64 taken = sample_values(kAdd, sparse, olds, news, n, stored);
    if (packing != int(kPlanes)) consider(kAdd, kTwoBit, two_bit_cost(stored, taken, codes, escapes));
    if (packing != int(kTwoBit)) consider(kAdd, kPlanes, choose_planes(stored, taken, -1));
  }
  if (operation != int(kAdd) && operation != int(kSet) && packing != int(kTwoBit)) {
    const u64 taken = sample_values(kXor, sparse, olds, news, n, stored);
    consider(kXor, kPlanes, choose_planes(stored, taken, -1));
  }
  return best;
}

struct PositionPlan {
  u32 kind = kGaps;
  u32 gap_planes = 1;
  u32 run_planes = 0;
};

// Gaps or runs, and planes. `work` has room for 3 * kSample gaps.
template <class G>
inline PositionPlan choose_positions(const G* gaps, u64 n, int kind, int gap_planes, u8* work) {
  G* sample = reinterpret_cast<G*>(work);
  G* run_gaps = sample + kSample;
  G* run_lengths = run_gaps + kSample;
  const u64 taken = sample_gaps(gaps, n, sample);
  Choice single;
  if (kind != int(kRuns)) single = choose_planes(sample, taken, gap_planes);
  if (kind == int(kGaps)) return PositionPlan{kGaps, single.planes, 0};
  const u64 runs = runs_of_gaps(sample, taken, run_gaps, run_lengths);
  if (kind != int(kRuns) && runs * 2 > taken) return PositionPlan{kGaps, single.planes, 0};
  const Choice starts = choose_planes(run_gaps, runs, gap_planes);
  const Choice lengths = choose_planes(run_lengths, runs, -1);
  if (kind == int(kRuns) || starts.bits + lengths.bits < single.bits)
    return PositionPlan{kRuns, starts.planes, lengths.planes};
  return PositionPlan{kGaps, single.planes, 0};
}

}  // namespace deltarefit::DR_LEVEL
