// A step: the fresh keys hashed, all keys ranked, the best selected and attended to.
//
// A thread takes a row from its query to its result while its codes are cached. Where there are fewer rows than would
// keep all threads busy, a row is cut into parts, and all wait for each other between the stages.
namespace BPC_ISA {

constexpr i64 LEAST_KEYS = 8192;      // keys that are worth a thread
constexpr i64 LEAST_ATTENDED = 64;    // attended tokens that are
constexpr i64 LEAST_CHOSEN = 1 << 14; // numbers of chosen keys that are, where else no stage would wait for another
constexpr i64 AGAIN = 1 << 21;        // bytes of matrices that rows may read again, each to hash its own key
constexpr i64 FEW_ROWS = 64;          // of more, threads take one after the other and end at about the same time

struct Plan {
    i64 rows, threads, stride;
    i64 slots;           // rows whose memory is there at once
    i64 parts, size;     // of a row that is ranked, and tokens of each
    i64 shares, each;    // of a list that is attended to, and tokens of each
};

static Plan plan_of(const bpc::Call &call) {
    Plan plan{};
    plan.rows = call.batch * call.kv_heads;
    bool chooses = call.stages & bpc::PROJECT;
    plan.threads = call.threads;
    plan.stride = ceil_to(call.tokens, PAD) + PAD;
    auto parts_of = [&](i64 length, i64 least) {
        if (plan.rows >= 2 * plan.threads || plan.threads == 1) return (i64)1;
        return most_of(1, least_of((2 * plan.threads + plan.rows - 1) / plan.rows, length / least));
    };
    plan.parts = chooses ? parts_of(call.tokens, LEAST_KEYS) : 1;
    plan.size = plan.parts == 1 ? plan.stride : ceil_to((call.tokens + plan.parts - 1) / plan.parts, PAD);
    bool apart = !chooses || plan.parts > 1;
    plan.shares = parts_of(call.width, apart ? LEAST_ATTENDED : most_of(LEAST_ATTENDED, LEAST_CHOSEN / call.dim));
    plan.each = (call.width + plan.shares - 1) / plan.shares;
    plan.slots = plan.parts == 1 && plan.shares == 1 ? least_of(plan.rows, plan.threads) : plan.rows;
    return plan;
}

// Hands out memory that begins at multiples of 64 bytes; without a beginning it only counts.
struct Bytes {
    char *at;
    template <class T>
    T *take(i64 count) {
        T *found = (T *)at;
        at += ceil_to(count * (i64)sizeof(T), 64);
        return found;
    }
};

static Room room_from(Bytes &bytes, const bpc::Call &call, const Plan &plan) {
    Room room{};
    if (!(call.stages & bpc::PROJECT)) return room;
    i64 heads = call.heads, stride = plan.stride;
    room.stride = stride;
    room.tables = bytes.take<i16>(ceil_to(heads, HEADS) * room_of_tables(!call.nibbles, call.bits));
    room.projected = bytes.take<float>(heads * vectors_of(call));
    room.products = bytes.take<i16>(heads * stride);
    room.best = bytes.take<i32>(plan.parts * heads * STRIPES);
    room.whole = bytes.take<i32>(heads);
    room.sampled = bytes.take<i16>(heads * SAMPLE);
    room.weights = bytes.take<u8>(SAMPLE);
    room.marks = bytes.take<u64>(stride / 64);
    room.places = bytes.take<i32>(stride);
    room.values = bytes.take<i32>(stride);
    room.counts = bytes.take<i64>(plan.parts);
    if (call.page) {
        room.codes = bytes.take<i64>(stride * call.words);
        room.gain = bytes.take<u8>(stride);
    }
    return room;
}

static Part part_from(Bytes &bytes, const bpc::Call &call, const Plan &plan) {
    Part part{};
    if (!(call.stages & bpc::ATTEND)) return part;
    i64 fours = ceil_to(call.heads, 4), dim = call.dim;
    part.sums = bytes.take<float>(fours * dim);
    part.most = bytes.take<float>(call.heads);
    part.total = bytes.take<float>(call.heads);
    part.queries = bytes.take<float>(fours * dim);
    part.logits = bytes.take<float>(fours * CHUNK);
    part.keys = bytes.take<const char *>(plan.each);
    part.values = bytes.take<const char *>(plan.each);
    if (call.values_at) part.unpacked = bytes.take<char>(plan.each * dim * (call.element == FLOAT32 ? 4 : 2));
    return part;
}

// Few rows, those that attend to most tokens first: then all threads end at about the same time.
static void longest_first(const bpc::Call &call, i64 rows, i64 *order) {
    for (i64 row = 0; row < rows; row++) {
        i64 place = row;
        for (; place && wanted_of(call, order[place - 1]) < wanted_of(call, row); place--) order[place] = order[place - 1];
        order[place] = row;
    }
}

// Keys in pages are those of all sequences, [1, H_KV, tokens, D].
template <Element E>
static void hash_all(const bpc::Call &call) {
    i64 rows = call.page ? call.kv_heads : call.batch * call.kv_heads;
    i64 threads = rows * call.fresh_tokens > 4 ? call.threads : 1;
    bpc::parallel(threads, rows, [&](i64 row) { hash_row<E>(call, row, 0, call.fresh_tokens); });
}

// The fresh keys of a row that is about to be ranked: in pages the newest one of its sequence.
template <Element E>
static void hash_own(const bpc::Call &call, i64 row) {
    i64 b = row / call.kv_heads;
    if (call.page)
        hash_row<E>(call, row % call.kv_heads, b, b + 1);
    else
        hash_row<E>(call, row, 0, call.fresh_tokens);
}

// All stages; whether an index is beyond the tokens there are.
template <Element E>
static bool choose_and_attend(const bpc::Call &call, const Plan &plan, char *memory, i64 bytes_room, i64 bytes_part) {
    bool chooses = call.stages & bpc::PROJECT, scores = call.stages & bpc::SCORE, selects = call.stages & bpc::SELECT;
    bool attends = call.stages & bpc::ATTEND;
    auto room_of = [&](i64 slot) {
        Bytes bytes{memory + slot * bytes_room};
        return room_from(bytes, call, plan);
    };
    auto part_of = [&](i64 index) {
        Bytes bytes{memory + plan.slots * bytes_room + index * bytes_part};
        return part_from(bytes, call, plan);
    };
    auto list_of = [&](i64 row) { return call.indices ? (i64 *)call.indices + row * call.width : nullptr; };
    auto out_of = [&](i64 row) { return (char *)call.out + size_of(E) * row * call.heads * call.dim; };
    if (plan.parts == 1 && plan.shares == 1) {
        bool beyond[256] = {};
        i64 taken = 0, order[FEW_ROWS];
        bool ordered = chooses && plan.rows <= FEW_ROWS;
        if (ordered) longest_first(call, plan.rows, order);
        // In pages a head's keys may be hashed together instead, which reads its matrices once.
        i64 again = call.page ? 4 * (plan.rows - call.kv_heads) * (call.matrix_r + call.gram_r + call.metric_r) : 0;
        bool hashes = call.stages & bpc::HASH, hashes_own = hashes && again <= AGAIN;
        if (hashes && !hashes_own) hash_all<E>(call);
        bpc::parallel(plan.threads, plan.slots, [&](i64 slot) {
            Room room = room_of(slot);
            Part part = part_of(slot);
            for (i64 nth; (nth = __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED)) < plan.rows;) {
                i64 row = ordered ? order[nth] : nth;
                i64 *list = list_of(row), count = call.width;
                if (hashes_own) hash_own<E>(call, row);
                if (chooses) prepare_row<E>(call, row, room);
                if (scores) score_part(call, row, 0, plan.size, room, room.best);
                if (selects) {
                    mark_row(call, row, 1, room);
                    room.counts[0] = candidates_of(call, row, 0, plan.size, room);
                    count = take_row(call, row, 1, plan.size, room, list);
                }
                if (attends) {
                    beyond[slot] |= attend_part<E>(call, row, list, 0, count, part);
                    put_together<E>(&part, 1, call.heads, call.dim, out_of(row));
                }
            }
        });
        for (bool each : beyond)
            if (each) return true;
        return false;
    }
    if (call.stages & bpc::HASH) hash_all<E>(call);
    // What a stage leaves to the next one stays in these.
    auto *rooms = new Room[plan.rows];
    auto *some = new Part[plan.rows * plan.shares];
    bool beyond = false;
    if (chooses) {
        bpc::parallel(plan.threads, plan.rows, [&](i64 row) {
            rooms[row] = room_of(row);
            prepare_row<E>(call, row, rooms[row]);
        });
    }
    if (scores) {
        bpc::parallel(plan.threads, plan.rows * plan.parts, [&](i64 task) {
            i64 row = task / plan.parts, part = task % plan.parts;
            Room &room = rooms[row];
            score_part(call, row, part * plan.size, (part + 1) * plan.size, room, room.best + part * call.heads * STRIPES);
        });
    }
    if (selects) {
        bpc::parallel(plan.threads, plan.rows, [&](i64 row) { mark_row(call, row, plan.parts, rooms[row]); });
        bpc::parallel(plan.threads, plan.rows * plan.parts, [&](i64 task) {
            i64 row = task / plan.parts, part = task % plan.parts;
            Room &room = rooms[row];
            room.counts[part] = candidates_of(call, row, part * plan.size, (part + 1) * plan.size, room);
        });
        bpc::parallel(plan.threads, plan.rows, [&](i64 row) {
            take_row(call, row, plan.parts, plan.size, rooms[row], list_of(row));
        });
    }
    if (attends) {
        bpc::parallel(plan.threads, plan.rows * plan.shares, [&](i64 task) {
            i64 row = task / plan.shares, begin = task % plan.shares * plan.each;
            some[task] = part_of(task);
            if (attend_part<E>(call, row, list_of(row), begin, least_of(call.width, begin + plan.each), some[task]))
                beyond = true;
        });
        bpc::parallel(plan.threads, plan.rows, [&](i64 row) {
            put_together<E>(some + row * plan.shares, plan.shares, call.heads, call.dim, out_of(row));
        });
    }
    delete[] rooms;
    delete[] some;
    return beyond;
}

template <Element E>
static bool step_of(const bpc::Call &call, char *(*memory)(i64)) {
    if (call.stages == bpc::HASH) {
        hash_all<E>(call);
        return false;
    }
    Plan plan = plan_of(call);
    Bytes room{nullptr}, part{nullptr};
    room_from(room, call, plan);
    part_from(part, call, plan);
    i64 bytes_room = (i64)room.at, bytes_part = (i64)part.at;
    i64 parts = plan.parts == 1 && plan.shares == 1 ? plan.slots : plan.rows * plan.shares;
    char *all = memory(plan.slots * bytes_room + parts * bytes_part);
    return choose_and_attend<E>(call, plan, all, bytes_room, bytes_part);
}

static bool step(const bpc::Call &call, char *(*memory)(i64)) {
    if (call.element == BFLOAT16) return step_of<BFLOAT16>(call, memory);
    if (call.element == FLOAT16) return step_of<FLOAT16>(call, memory);
    return step_of<FLOAT32>(call, memory);
}

// The greedy pass over float32 products `[rows, tokens, bits]`; results `[rows, tokens, ..]`.
static void greedy(i64 threads, const float *products, const float *norms, const float *gram, i64 rows, i64 tokens,
                   i64 bits, i64 *codes, float *errors, u8 *gains) {
    i64 blocks = (tokens + SIDE - 1) / SIDE;
    bpc::parallel(threads, rows * blocks, [&](i64 task) {
        i64 row = task / blocks, first = task % blocks * SIDE, begin = row * tokens + first;
        greedy_many(products + begin * bits, norms + begin, gram + row * bits * bits, least_of(SIDE, tokens - first), bits,
                    codes + begin * ((bits + 63) / 64), errors + begin, gains + begin);
    });
}

// The search for nibbles, see `bpc::Kernels`.
static void search_codes(i64 threads, const float *products, const float *norms, const float *gram, const float *squares,
                         i64 codebooks, i64 rows, i64 tokens, i64 bits, i64 *codes, float *errors, u8 *gains) {
    i64 blocks = (tokens + TOGETHER - 1) / TOGETHER, size = 4 * bits, words = (bits + 63) / 64;
    bpc::parallel(threads, rows * blocks, [&](i64 task) {
        i64 row = task / blocks, first = task % blocks * TOGETHER, begin = row * tokens + first;
        i64 own = row % codebooks;  // sequences may share them
        Vectors vectors{gram + own * size * size, NIBBLE, size * NIBBLE, squares + own * size};
        search_many(products + begin * size, norms + begin, vectors, least_of(TOGETHER, tokens - first), bits / 4,
                    codes + begin * words, errors + begin, gains + begin);
    });
}

}  // namespace BPC_ISA
