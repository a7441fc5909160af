// Step 3: the forced tokens and the best ranked, exactly `k`, ascending.
//
// The ranks of a sample of the keys give a bound that the best keys most probably reach. Then all keys are ranked, a
// block at a time; those that reach the bound are the candidates, and the best are found among them digit by digit.
// Where too few reach it, all keys are candidates.
namespace BPC_ISA {

constexpr i32 FORCED = 1 << 28;     // instead of a rank: attended in any case; above every sum of 16 scores
constexpr i32 NEVER = INT32_MIN;    // instead of a rank: padding
constexpr i64 DIGIT = 11;           // bits
constexpr i64 NEAR = 1024;          // at most so many values are copied, to go on with them alone

struct Kth {
    i32 value;
    i64 equal;
};

// The `k`-th largest of the first `count` int32, and how many like it are among the `k`. If not `exact`, a value a little
// smaller, and how many of the `k` share its digits so far.
static Kth kth(const i32 *values, i64 count, i64 k, bool exact) {
    i32 bins[1 << DIGIT], near[NEAR], most = values[0], least = values[0];
    for (i64 i = 0; i < count; i++) {
        most = values[i] > most ? values[i] : most;
        least = values[i] < least ? values[i] : least;
    }
    i64 span = (i64)most - least, shift = 0, prefix = 0, left = k, width = DIGIT;
    while (span >> (shift + DIGIT)) shift++;
    for (;;) {
        std::memset(bins, 0, sizeof bins);
        for (i64 i = 0; i < count; i++) {
            i64 below = (i64)most - values[i];
            if (below >> (shift + width) == prefix) bins[(below >> shift) & ((1 << width) - 1)]++;
        }
        i64 digit = 0;
        while (bins[digit] < left) left -= bins[digit++];
        prefix = (prefix << width) | digit;
        if (shift == 0 || !exact) return {(i32)(most - (((prefix + 1) << shift) - 1)), left};
        if (bins[digit] <= NEAR && count > NEAR) {
            i64 kept = 0;
            for (i64 i = 0; i < count; i++)
                if (((i64)most - values[i]) >> shift == prefix) near[kept++] = values[i];
            values = near, count = kept;
        }
        width = least_of(DIGIT, shift);
        shift -= width;
    }
}

INLINE bool is_marked(const u64 *marks, i64 place) { return marks[place >> 6] >> (place & 63) & 1; }
INLINE void mark(u64 *marks, i64 place) { marks[place >> 6] |= (u64)1 << (place & 63); }

// Mark the tokens that are attended whatever their rank: the newest, the first, those coded worst.
static void force(const bpc::Call &call, i64 row, i64 length, i64 k, const u8 *valid, u64 *marks) {
    i64 marked = 0, first;
    for (i64 place = length - 1; marked < least_of(k, call.recent) && place >= 0; place--)
        if (!valid || valid[place]) mark(marks, place), marked++;
    first = marked;
    for (i64 place = 0; first < least_of(k, marked + call.sink) && place < length; place++)
        if (!valid || valid[place]) {
            if (is_marked(marks, place)) break;  // the newest tokens begin here
            mark(marks, place), first++;
        }
    marked = first;
    const i32 *worst = (const i32 *)call.worst + row * call.worst_count;
    i64 places = k * call.numerator / call.denominator;
    for (i64 i = 0; i < call.worst_count && marked < k && places; i++) {
        i64 place = worst[i];
        if (place >= 0 && place < length && (!valid || valid[place]) && !is_marked(marks, place))
            mark(marks, place), marked++, places--;
    }
}

// How many tokens to choose for a row.
INLINE i64 wanted_of(const bpc::Call &call, i64 row) {
    i64 place = row / call.kv_heads * call.ks_b + row % call.kv_heads * call.ks_h;
    return least_of(call.width, ((const i64 *)call.ks)[place]);
}

// Mark the forced tokens of a row, and find the rank from which on a key is a candidate.
static void mark_row(const bpc::Call &call, i64 row, i64 parts, Room &room) {
    i64 b = row / call.kv_heads, length = length_of(call, b), wanted = wanted_of(call, row);
    const u8 *valid = valid_of(call, b);
    std::memset(room.marks, 0, room.stride / 8);
    force(call, row, length, wanted, valid, room.marks);
    // A rank that more than `wanted` keys most probably reach, from the sample.
    i64 step = sample_step(length), count = (length + step - 1) / step;
    double expected = (double)(wanted * count) / (double)most_of(1, length);
    alignas(64) i32 ranks[SAMPLE];
    put_whole(call, parts, room);
    rank_keys(ranker_of(call, room), room.sampled, SAMPLE, call.gained ? room.weights : nullptr, count, ranks);
    if (valid) {
        i64 real = 0;
        for (i64 i = 0; i < count; i++) {
            ranks[real] = ranks[i];
            real += valid[i * step] != 0;
        }
        count = real;  // without padding
    }
    i64 enough = (i64)(expected + 4 * __builtin_sqrt(expected) + 8);
    room.least = enough < count ? kth(ranks, count, enough, false).value : NEVER + 1;
}

// A bit for each of 64 int32: whether it is at least `least`.
INLINE u64 at_least(const i32 *ranks, i32 least) {
    u64 bits = 0;
#if defined(__AVX512F__)
    for (int i = 0; i < 4; i++)
        bits |= (u64)_mm512_cmpge_epi32_mask(_mm512_loadu_si512(ranks + 16 * i), _mm512_set1_epi32(least)) << (16 * i);
#elif defined(__AVX2__)
    for (int i = 0; i < 8; i++) {
        __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(least), _mm256_loadu_si256((const __m256i *)(ranks + 8 * i)));
        bits |= (u64)(u8)~_mm256_movemask_ps(_mm256_castsi256_ps(below)) << (8 * i);
    }
#else
    for (int i = 0; i < 64; i++) bits |= (u64)(ranks[i] >= least) << i;
#endif
    return bits;
}

// The candidates among the tokens from `begin` to `end` of a row, and how many: those with a rank of at least
// `room.least` or that are forced. They lie from `begin` on.
static i64 candidates_of(const bpc::Call &call, i64 row, i64 begin, i64 end, Room &room) {
    i64 b = row / call.kv_heads, length = least_of(length_of(call, b), end), taken = 0;
    const u8 *valid = valid_of(call, b), *gains = gain_of(call, b, row % call.kv_heads, room);
    Ranker ranker = ranker_of(call, room);
    i32 *places = room.places + begin, *values = room.values + begin;
    alignas(64) i32 ranks[BLOCK + 64];
    for (; begin < length; begin += BLOCK) {
        i64 count = least_of(BLOCK, length - begin);
        if (only_padding(valid, begin, count)) continue;
        rank_keys(ranker, room.products + begin, room.stride, gains ? gains + begin : nullptr, count, ranks);
        if (valid)
            for (i64 i = 0; i < count; i++) ranks[i] = valid[begin + i] ? ranks[i] : NEVER;
        for (i64 i = count; i < ceil_to(count, 64); i++) ranks[i] = NEVER;
        for (i64 first = 0; first < count; first += 64) {
            u64 forced = room.marks[(begin + first) >> 6], bits = at_least(ranks + first, room.least) | forced;
            i64 before = taken;
            for (; bits; bits &= bits - 1, taken++) {
                i64 place = first + __builtin_ctzll(bits);
                places[taken] = (i32)(begin + place), values[taken] = ranks[place];
            }
            if (forced)
                for (i64 i = before; i < taken; i++)
                    if (is_marked(room.marks, places[i])) values[i] = FORCED;
        }
    }
    return taken;
}

// The places of the best, ascending, int64 `[width]`, -1 behind the last; how many there are.
static i64 take_row(const bpc::Call &call, i64 row, i64 parts, i64 part_size, Room &room, i64 *out) {
    i64 wanted = wanted_of(call, row), found = 0, count = 0, taken = 0;
    for (i64 part = 0; part < parts; part++) found += room.counts[part];
    if (found < wanted && room.least > NEVER + 1) {
        room.least = NEVER + 1;
        for (i64 part = 0; part < parts; part++)
            room.counts[part] = candidates_of(call, row, part * part_size, (part + 1) * part_size, room);
    }
    for (i64 part = 0; part < parts; part++) {
        i64 from = part * part_size, some = room.counts[part];
        if (part) {
            std::memmove(room.places + count, room.places + from, 4 * some);
            std::memmove(room.values + count, room.values + from, 4 * some);
        }
        count += some;
    }
    wanted = least_of(wanted, count);
    if (wanted > 0) {
        Kth least = kth(room.values, count, wanted, true);
        for (i64 i = 0; i < count && taken < wanted; i++) {
            i32 value = room.values[i];
            i64 tie = (value == least.value) & (least.equal > 0);  // no branch: half of the candidates are taken
            out[taken] = room.places[i];
            taken += (value > least.value) | tie;
            least.equal -= tie;
        }
    }
    for (i64 i = taken; i < call.width; i++) out[i] = -1;
    return taken;
}

}  // namespace BPC_ISA
