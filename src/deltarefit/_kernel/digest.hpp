// Additive two-lane digest (docs/format.md §5). Part of level.inl.

namespace deltarefit::DR_LEVEL {

constexpr u64 kGolden = 0x9E3779B97F4A7C15ull;
constexpr u64 kMix = 0xD6E8FEB86659FD93ull;
constexpr u64 kMix0 = 0xBF58476D1CE4E5B9ull;
constexpr u64 kMix1 = 0x94D049BB133111EBull;

// Running sums, several elements at a time.
class DigestSum {
 public:
  // `s` is key + (position + 1) * golden ratio of each lane's element.
  void add(V64 s, V64 value) {
    const V64 t = s ^ value;
    V64 u = (t ^ shifted_right<32>(t)) * mix_;
    u = u ^ shifted_right<29>(u);
    const V64 a0 = u * mix0_;
    const V64 a1 = u * mix1_;
    lane0_ = lane0_ + (a0 ^ shifted_right<32>(a0));
    lane1_ = lane1_ + (a1 ^ shifted_right<32>(a1));
  }

  void add_one(u64 s, u64 value) {
    const u64 t = s ^ value;
    u64 u = (t ^ (t >> 32)) * kMix;
    u ^= u >> 29;
    const u64 a0 = u * kMix0;
    const u64 a1 = u * kMix1;
    rest_ = rest_ + Lanes{a0 ^ (a0 >> 32), a1 ^ (a1 >> 32)};
  }

  Lanes total() const { return Lanes{lane0_.sum(), lane1_.sum()} + rest_; }

 private:
  V64 lane0_ = V64::all(0), lane1_ = V64::all(0);
  Lanes rest_;
  const Factor mix_{kMix}, mix0_{kMix0}, mix1_{kMix1};
};

// n elements `step` positions apart, the first at position `start`.
template <class W>
inline void add_progression(DigestSum& sum, const u8* values, u64 start, u64 step, u64 n, u64 key) {
  const u64 first = key + (start + 1) * kGolden, one = step * kGolden;
  V64 s = V64::all(first) + V64::iota() * Factor(one);
  const V64 all = V64::all(one * V64::kLanes);
  u64 i = 0;
  for (; i + V64::kLanes <= n; i += V64::kLanes, s = s + all) sum.add(s, V64::widened<W>(values + i * sizeof(W)));
  for (; i < n; ++i) sum.add_one(first + i * one, load<W>(values + i * sizeof(W)));
}

// n elements that lie one behind the other, the first at position `start`.
template <class W>
inline Lanes digest_dense(const u8* values, u64 start, u64 n, u64 key) {
  DigestSum sum;
  add_progression<W>(sum, values, start, 1, n, key);
  return sum.total();
}

// Calls use(i, s) for each vector of positions start + offsets[i] and use_one(i, s) for those left over.
template <class P, class Use, class UseOne>
inline void for_positions(const P* offsets, u64 start, u64 n, u64 key, Use use, UseOne use_one) {
  const u64 first = key + (start + 1) * kGolden;
  const V64 firsts = V64::all(first);
  const Factor golden(kGolden);
  u64 i = 0;
  for (; i + V64::kLanes <= n; i += V64::kLanes)
    use(i, V64::widened<P>(reinterpret_cast<const u8*>(offsets + i)) * golden + firsts);
  for (; i < n; ++i) use_one(i, first + offsets[i] * kGolden);
}

template <class W>
inline V64 widened(const W* values) {
  return V64::widened<W>(reinterpret_cast<const u8*>(values));
}

// n elements of a piece, the first its element `start`: row by row.
template <class W>
inline Lanes digest_rows(const u8* values, u64 n, u64 start, const Place& place) {
  RowWalker walker(place.rows);
  DigestSum sum;
  for (u64 done = 0; done < n;) {
    const u64 position = walker.at(start + done), left = walker.left(start + done);
    const u64 m = left < n - done ? left : n - done;
    add_progression<W>(sum, values + done * sizeof(W), position, walker.step(), m, place.key);
    done += m;
  }
  return sum.total();
}

// n elements from the piece's element `start` on.
template <class W>
inline Lanes digest_all(const u8* values, u64 n, u64 start, const Place& place) {
  return place.rows.flat() ? digest_dense<W>(values, start, n, place.key) : digest_rows<W>(values, n, start, place);
}

template <class W, class P>
inline Lanes digest_sparse(const P* offsets, u64 start, const W* values, u64 n, u64 key) {
  DigestSum sum;
  for_positions(
      offsets, start, n, key, [&](u64 i, V64 s) { sum.add(s, widened(values + i)); },
      [&](u64 i, u64 s) { sum.add_one(s, values[i]); });
  return sum.total();
}

// Of two sets of values at the same positions, in one pass; adds to before and after. Calls meanwhile() every eight
// elements or so.
template <class W, class P, class Meanwhile>
inline void digest_pair(const P* offsets, u64 start, const W* olds, const W* news, u64 n, u64 key, Lanes& before,
                        Lanes& after, Meanwhile meanwhile) {
  DigestSum old_sum, new_sum;
  for_positions(
      offsets, start, n, key,
      [&](u64 i, V64 s) {
        if (i % 8 == 0) meanwhile();
        old_sum.add(s, widened(olds + i));
        new_sum.add(s, widened(news + i));
      },
      [&](u64 i, u64 s) {
        old_sum.add_one(s, olds[i]);
        new_sum.add_one(s, news[i]);
      });
  before = before + old_sum.total();
  after = after + new_sum.total();
}

}  // namespace deltarefit::DR_LEVEL
