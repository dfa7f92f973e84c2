// Choice of an encoding by estimated compressed size. Part of level.inl.
//
// zstd codes bytes with Huffman codes: at least a bit a byte, unless a stream is so uneven that its match search
// finds long repeats; there the entropy itself is the better guess.

namespace deltarefit::DR_LEVEL {

constexpr u64 kSample = 16384;      // most changes looked at
constexpr u64 kSmallSample = 2048;  // up to so many, all are
constexpr u64 kSampleRun = 512;     // else in pieces of so many
constexpr double kNearlyConstant = 0.2;
constexpr double kWorthAPlane = 0.99;
constexpr double kNever = 1e300;

struct Choice {
  u32 planes = 1;
  double bits = kNever;
};

// n log2 n with an error of log2 below 1e-4; 0 for 0. Without branches, so that it runs over vectors.
inline float n_log2_n(u32 n) {
  const float value = float(n + (n == 0));
  u32 bits;
  __builtin_memcpy(&bits, &value, 4);
  const float exponent = float(int(bits >> 23) - 127);
  bits = (bits & 0x007FFFFFu) | 0x3F800000u;
  float m;
  __builtin_memcpy(&m, &bits, 4);
  const float t = (m - 1) / (m + 1), tt = t * t;
  return float(n) * (exponent + 2.885390f * t * (1 + tt * (1.f / 3 + tt * (0.2f + tt * (1.f / 7)))));
}

// Bits of a Huffman code for a histogram of n bytes, `sum` being its sum of n_log2_n. Whole bits only hurt where
// symbols are frequent: those of more than a sixteenth are coded as Huffman would, the others together as one
// symbol and, among themselves, by their entropy.
inline double huffman_bits(const u32* histogram, u64 n, double sum) {
  u64 weights[17];
  u32 items = 0;
  u64 rest = n;
  for (u32 i = 0; i < 256; ++i) {
    if (u64(histogram[i]) * 16 <= n) continue;
    weights[items++] = histogram[i];
    rest -= histogram[i];
    sum -= n_log2_n(histogram[i]);
  }
  double bits = double(n_log2_n(u32(rest))) - sum;
  if (rest != 0) weights[items++] = rest;
  if (items == 1) return rest != 0 ? bits : double(n);
  for (; items > 1; --items) {
    u32 low = 0, second = 1;  // places of the two lightest
    if (weights[second] < weights[low]) low = 1, second = 0;
    for (u32 i = 2; i < items; ++i) {
      if (weights[i] < weights[low]) second = low, low = i;
      else if (weights[i] < weights[second]) second = i;
    }
    weights[low] += weights[second];
    bits += double(weights[low]);
    weights[second] = weights[items - 1];
  }
  return bits;
}

// Estimated bits of a stream with this histogram of n bytes.
inline double stream_bits(const u32* histogram, u64 n) {
  if (n == 0) return 0;
  constexpr u32 kPart = 16;  // sums side by side: floating-point addition has an order that vectors cannot keep
  float sums[kPart] = {};
  u32 symbols = 0;
  for (u32 i = 0; i < 256; i += kPart)
    for (u32 j = 0; j < kPart; ++j) sums[j] += n_log2_n(histogram[i + j]);
  for (u32 i = 0; i < 256; ++i) symbols += histogram[i] != 0;
  double sum = 0;
  for (float part : sums) sum += part;
  // Small samples look too even; this is the usual first correction of their entropy (in bits).
  const double entropy = double(n_log2_n(u32(n))) - sum + 0.72 * (symbols - 1);
  // What is constant in a small delta need not be in the stream that it becomes part of.
  if (n >= kSampleRun && entropy < kNearlyConstant * double(n)) return entropy;
  return huffman_bits(histogram, n, sum);
}

// Four tables, so that a byte that comes again and again does not wait for its own last count.
inline void count_bytes(const u8* bytes, u64 n, u32* histogram) {
  u32 parts[3][256] = {};
  for (u32 i = 0; i < 256; ++i) histogram[i] = 0;
  u64 i = 0;
  for (; i + 4 <= n; i += 4) {
    ++histogram[bytes[i]];
    ++parts[0][bytes[i + 1]];
    ++parts[1][bytes[i + 2]];
    ++parts[2][bytes[i + 3]];
  }
  for (; i < n; ++i) ++histogram[bytes[i]];
  for (u32 j = 0; j < 256; ++j) histogram[j] += parts[0][j] + parts[1][j] + parts[2][j];
}

inline double bytes_bits(const u8* bytes, u64 n) {
  u32 histogram[256];
  count_bytes(bytes, n, histogram);
  return stream_bits(histogram, n);
}

// Both take room for the bytes of the plane or chain.
template <class T>
inline double plane_bits(const T* values, u64 n, u32 plane, u8* room) {
  pack_plane(values, n, plane, room);
  return bytes_bits(room, n);
}

constexpr u64 kMostExtra = 4;  // chain bytes beyond one per integer of an array that is worth a look

template <class T>
inline double chain_bits(const T* values, u64 n, u32 planes, u8* room) {
  const u8* end = pack_chain(values, n, planes, room, room + n * (1 + kMostExtra));
  return end == nullptr ? kNever : bytes_bits(room, u64(end - room));
}

// The best number of planes for a sample, or the cost of the forced one.
template <class T>
inline Choice choose_planes(const T* values, u64 n, int forced, u8* room) {
  Choice best;
  if (n == 0) return Choice{1, 0};
  double low_bits = 0;
  for (u32 planes = 1; planes <= 8; ++planes) {
    const u64 extra = chain_extra(values, n, planes);
    const double bits = extra > kMostExtra * n ? kNever : low_bits + chain_bits(values, n, planes, room);
    // A stream more must earn its keep: it costs its reader a pass, and zstd a frame.
    if (bits < best.bits * kWorthAPlane) best = Choice{planes, bits};
    if (extra * 32 <= n) break;  // one more plane would be nearly constant
    low_bits += plane_bits(values, n, planes - 1, room);
  }
  if (forced > 0) best.planes = u32(forced);
  return best;
}

// A sample is the whole of a small array, or pieces of a large one, evenly spread.
struct Sample {
  u64 pieces, length, step;

  explicit Sample(u64 n) : pieces(1), length(n), step(0) {
    if (n <= kSmallSample) return;
    const u64 wanted = n / 16 < kSmallSample ? kSmallSample : n / 16 > kSample ? kSample : n / 16;
    pieces = wanted / kSampleRun;
    length = kSampleRun;
    step = (n - length) / (pieces - 1);
  }
};

template <class W>
inline u64 sample_values(u32 operation, bool sparse, const W* olds, const W* news, u64 n, W* out) {
  const Sample sample(n);
  for (u64 k = 0; k < sample.pieces; ++k) {
    const u64 at = k * sample.step;
    stored_values(operation, sparse, olds + at, news + at, sample.length, out + k * sample.length);
  }
  return sample.pieces * sample.length;
}

template <class G>
inline u64 sample_gaps(const G* gaps, u64 n, G* out) {
  const Sample sample(n);
  for (u64 k = 0; k < sample.pieces; ++k)
    __builtin_memcpy(out + k * sample.length, gaps + k * sample.step, sample.length * sizeof(G));
  return sample.pieces * sample.length;
}

struct ValuePlan {
  u32 operation = kXor;
  u32 packing = kPlanes;
  u32 planes = 1;
  double bits = kNever;
};

// Cost of two-bit codes for stored differences. `escapes` has room for n.
template <class W>
inline Choice two_bit_cost(const W* stored, u64 n, W* escapes, u8* room) {
  const u64 escaped = pack_two_bit(stored, n, room, escapes);
  const double codes = bytes_bits(room, (n + 3) / 4);
  Choice choice = choose_planes(escapes, escaped, -1, room);
  choice.bits += codes;
  return choice;
}

// Room for the arrays that the choices below work in.
constexpr u64 kChoiceBytes = kSample * (3 * 8 + 1 + kMostExtra);

// Operation, packing and planes of the values. `work` is kChoiceBytes long.
template <class W>
inline ValuePlan choose_values(const W* olds, const W* news, u64 n, bool sparse, int operation, int packing, u8* work) {
  W* stored = reinterpret_cast<W*>(work);
  W* escapes = stored + kSample;
  u8* room = reinterpret_cast<u8*>(escapes + kSample);
  ValuePlan best;
  const auto consider = [&](u32 op, u32 pack, Choice choice) {
    if (choice.bits < best.bits || best.bits == kNever) best = ValuePlan{op, pack, choice.planes, choice.bits};
  };
  if (operation == int(kSet)) {
    const u64 taken = sample_values(kSet, sparse, olds, news, n, stored);
    consider(kSet, kPlanes, choose_planes(stored, taken, -1, room));
  }
  if (operation != int(kXor) && operation != int(kSet)) {
    const u64 taken = sample_values(kAdd, sparse, olds, news, n, stored);
    if (packing != int(kPlanes)) consider(kAdd, kTwoBit, two_bit_cost(stored, taken, escapes, room));
    if (packing != int(kTwoBit)) consider(kAdd, kPlanes, choose_planes(stored, taken, -1, room));
  }
  if (operation != int(kAdd) && operation != int(kSet) && packing != int(kTwoBit)) {
    const u64 taken = sample_values(kXor, sparse, olds, news, n, stored);
    consider(kXor, kPlanes, choose_planes(stored, taken, -1, room));
  }
  return best;
}

struct PositionPlan {
  u32 kind = kGaps;
  u32 gap_planes = 1;
  u32 run_planes = 0;
};

// Gaps or runs, and planes. `work` is kChoiceBytes long.
template <class G>
inline PositionPlan choose_positions(const G* gaps, u64 n, int kind, int gap_planes, u8* work) {
  G* sample = reinterpret_cast<G*>(work);
  G* run_gaps = sample + kSample;
  G* run_lengths = run_gaps + kSample;
  u8* room = reinterpret_cast<u8*>(run_lengths + kSample);
  const u64 taken = sample_gaps(gaps, n, sample);
  Choice single;
  if (kind != int(kRuns)) single = choose_planes(sample, taken, gap_planes, room);
  if (kind == int(kGaps)) return PositionPlan{kGaps, single.planes, 0};
  const u64 runs = runs_of_gaps(sample, taken, run_gaps, run_lengths);
  if (kind != int(kRuns) && runs * 2 > taken) return PositionPlan{kGaps, single.planes, 0};
  const Choice starts = choose_planes(run_gaps, runs, gap_planes, room);
  const Choice lengths = choose_planes(run_lengths, runs, -1, room);
  if (kind == int(kRuns) || starts.bits + lengths.bits < single.bits)
    return PositionPlan{kRuns, starts.planes, lengths.planes};
  return PositionPlan{kGaps, single.planes, 0};
}

}  // namespace deltarefit::DR_LEVEL
