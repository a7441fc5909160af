// Hashing keys with nibbles: the beam search of `bpc_calib.method.nibbles`. Every sum that decides has one order, so from
// the same products the codes are those of plain torch.
//
// Many keys take the stages of the search together: what a stage reads of the Gram matrix is then in the nearest cache.
namespace BPC_ISA {

constexpr i64 NIBBLE = 16, BEAM = 4;
constexpr i64 MOST_NIBBLES = 32;
constexpr i64 PARTS = NIBBLE / LANES;             // vectors of the costs of one partial code
constexpr i64 TOGETHER = 32;             // keys
constexpr i32 PLACE = BEAM * NIBBLE - 1;          // the bits of a sort key that hold the place of a candidate

// The inner products of the vectors of one codebook: of vector `v` with those of nibble `j` they begin at
// `gram + v * vector + j * nibble`.
struct Vectors {
    const float *gram;
    i64 vector, nibble;
    const float *squares;  // of each with itself
};

// The partial codes of a key, the best first: where in the Gram matrix the vectors begin that
// they name, and their costs.
struct Beam {
    u32 at[BEAM][MOST_NIBBLES];
    float cost[BEAM];
};

// In each lane the smallest of what it has seen, ascending.
struct Least {
    ints values[BEAM];
};

INLINE void order(ints &a, ints &b) {
    ints less = smaller(a, b);
    b = larger(a, b);
    a = less;
}

INLINE Least sorted(const ints *values) {
    Least all{{values[0], values[1], values[2], values[3]}};
    ints *v = all.values;
    order(v[0], v[1]), order(v[2], v[3]), order(v[0], v[2]), order(v[1], v[3]), order(v[1], v[2]);
    return all;
}

// The smallest of both: of one ascending list and one descending list, the smaller of each pair, which are bitonic.
INLINE Least merged(const Least &a, const Least &b) {
    Least all;
    ints *v = all.values;
    for (i64 i = 0; i < BEAM; i++) v[i] = smaller(a.values[i], b.values[BEAM - 1 - i]);
    order(v[0], v[2]), order(v[1], v[3]), order(v[0], v[1]), order(v[2], v[3]);
    return all;
}

// Merge the lanes of `count <= LANES` keys in pairs of neighbours until key `i` has lane `i` of `keys[0]` alone.
INLINE void merge_lanes(Least *keys, i64 count) {
    for (i64 width = LANES; width > 1; width /= 2) {
        for (i64 i = 0; i < (count + 1) / 2; i++) {
            const Least &one = keys[2 * i], &other = keys[least_of(2 * i + 1, count - 1)];
            Least even, odd;
            for (i64 b = 0; b < BEAM; b++) part_lanes(one.values[b], other.values[b], even.values[b], odd.values[b]);
            keys[i] = merged(even, odd);
        }
        count = (count + 1) / 2;
    }
}

// What the candidates of nibble `j` cost, float32 `[BEAM, NIBBLE]`, and in each lane the least of their sort keys.
INLINE Least extend(const float *products, const Vectors &vectors, i64 j, const Beam &beam, float *costs) {
    floats adding[BEAM][PARTS];
    for (i64 part = 0; part < PARTS; part++) {
        i64 at = j * NIBBLE + part * LANES;
        floats alone = fma(splat(-2.0f), load<floats>(products + at), load<floats>(vectors.squares + at));
        for (i64 b = 0; b < BEAM; b++) adding[b][part] = alone;
    }
    const float *gram = vectors.gram + j * vectors.nibble;
    for (i64 i = 0; i < j; i++)
        for (i64 b = 0; b < BEAM; b++) {
            const float *row = gram + beam.at[b][i];
            for (i64 part = 0; part < PARTS; part++)
                adding[b][part] = fma(splat(2.0f), load<floats>(row + part * LANES), adding[b][part]);
        }
    ints keys[BEAM * PARTS];
    for (i64 b = 0; b < BEAM; b++)
        for (i64 part = 0; part < PARTS; part++) {
            i64 place = b * PARTS + part;
            floats cost = splat(beam.cost[b]) + adding[b][part];
            store(costs + place * LANES, cost);
            ints bits = (ints)cost, ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF);
            keys[place] = (ordered & ~PLACE) | (counting() + (i32)(place * LANES));
        }
    Least least = sorted(keys);
    for (i64 part = 1; part < PARTS; part++) least = merged(least, sorted(keys + BEAM * part));
    return least;
}

// Go on with the candidates at `places`, each every `LANES` numbers.
INLINE void advance(Beam &beam, i64 j, i64 vector, const i32 *places, const float *costs) {
    for (i64 i = 0; i < j; i += LANES) {
        words old[BEAM];
        for (i64 b = 0; b < BEAM; b++) old[b] = load<words>(beam.at[(places[b * LANES] & PLACE) / NIBBLE] + i);
        for (i64 b = 0; b < BEAM; b++) store(beam.at[b] + i, old[b]);
    }
    for (i64 b = 0; b < BEAM; b++) {
        i64 place = places[b * LANES] & PLACE;
        beam.at[b][j] = (u32)((j * NIBBLE + place % NIBBLE) * vector);
        beam.cost[b] = costs[place];
    }
}

// The code, error and gain of a key.
INLINE void put_code(const float *products, float norm, i64 vector, i64 nibbles, const Beam &beam, Place to) {
    float dot = 0;
    for (i64 w = 0; w < (nibbles + 15) / 16; w++) to.code[w] = 0;
    for (i64 j = 0; j < nibbles; j++) {
        i64 named = beam.at[0][j] / vector, value = named % NIBBLE;
        dot += products[named];
        to.code[j / 16] |= (i64)((u64)value << 4 * (j % 16));
    }
    if (to.error) *to.error = error_of(norm + beam.cost[0]);
    if (to.gain) *to.gain = gain_of(norm, dot);
}

// Search for the codes of at most `TOGETHER` keys with products `[count, 16 * nibbles]`.
INLINE void search(const float *products, const Vectors &vectors, i64 count, i64 nibbles, Beam *beams) {
    alignas(64) float costs[LANES][BEAM * NIBBLE];
    Least least[LANES];
    alignas(64) i32 places[BEAM * LANES];
    // Before the first nibble there is one partial code.
    for (i64 key = 0; key < count; key++) beams[key] = {{}, {0, INFINITY, INFINITY, INFINITY}};
    for (i64 j = 0; j < nibbles; j++)
        for (i64 first = 0; first < count; first += LANES) {
            i64 some = least_of(LANES, count - first);
            for (i64 i = 0; i < some; i++) {
                const float *own = products + (first + i) * nibbles * NIBBLE;
                least[i] = extend(own, vectors, j, beams[first + i], costs[i]);
            }
            merge_lanes(least, some);
            for (i64 b = 0; b < BEAM; b++) store(places + b * LANES, least[0].values[b]);
            for (i64 i = 0; i < some; i++) advance(beams[first + i], j, vectors.vector, places + i, costs[i]);
        }
}

// The code of one key.
static void search_one(const float *products, float norm, const Vectors &vectors, i64 nibbles, Place to) {
    Beam beam;
    search(products, vectors, 1, nibbles, &beam);
    put_code(products, norm, vectors.vector, nibbles, beam, to);
}

// Those of up to `TOGETHER` keys, results `[count, ..]`.
static void search_many(const float *products, const float *norms, const Vectors &vectors, i64 count, i64 nibbles,
                        i64 *codes, float *errors, u8 *gains) {
    Beam beams[TOGETHER];
    search(products, vectors, count, nibbles, beams);
    i64 words = (nibbles + 15) / 16;
    for (i64 key = 0; key < count; key++)
        put_code(products + key * nibbles * NIBBLE, norms[key], NIBBLE, nibbles, beams[key],
                 {codes + key * words, gains + key, errors + key});
}

}  // namespace BPC_ISA
