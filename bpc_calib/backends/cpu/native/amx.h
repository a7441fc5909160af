// Linear layers of a few tokens with AMX, in bfloat16: products of tiles, each with 16 rows of 64 bytes, so that up to 16
// tokens take no longer than the matrix takes to be read.
namespace BPC_ISA {

#if defined(BPC_AMX) && BPC_BYTES == 64
constexpr i64 EDGE = 16;  // rows of a tile

struct alignas(64) Shapes {
    u8 palette = 1, start = 0, reserved[14] = {};
    u16 bytes[EDGE] = {};  // of the rows of each tile
    u8 rows[EDGE] = {};
};

// Products of tiles of rows with `count` tokens, `[columns / 32, 16, count, 2]`, of which a tile holds pairs of 32 columns.
// Nothing is prefetched: processors foresee sixteen rows at once, and a prefetch of each line costs more than it gains.
template <int TILES>
__attribute__((target("amx-tile,amx-bf16"))) static void products_of_tiles(const char *rows, i64 columns,
                                                                           const char *tokens, i64 count, float *sums) {
    i64 row = 2 * columns, pairs = 4 * count;
    _tile_zero(0);
    _tile_zero(1);
    for (const char *end = rows + row; rows < end; rows += 64, tokens += EDGE * pairs) {
        _tile_loadd(4, tokens, pairs);
        _tile_loadd(2, rows, row);
        _tile_dpbf16ps(0, 2, 4);
        if constexpr (TILES == 2) {
            _tile_loadd(3, rows + EDGE * row, row);
            _tile_dpbf16ps(1, 3, 4);
        }
    }
    _tile_stored(0, sums, pairs);
    if constexpr (TILES == 2) _tile_stored(1, sums + EDGE * count, pairs);
}

// Tiles 0 and 1 hold sums, 2 and 3 rows of the matrix, 4 tokens.
__attribute__((target("amx-tile"))) static void shape_tiles(i64 rows, i64 count) {
    Shapes shapes;
    for (int tile = 0; tile < 5; tile++) {
        shapes.rows[tile] = (u8)(tile < 4 ? rows : EDGE);
        shapes.bytes[tile] = (u16)(tile == 2 || tile == 3 ? 64 : 4 * count);
    }
    asm volatile("ldtilecfg %0" : : "m"(shapes));  // GCC believes of `_tile_loadconfig` that it reads eight bytes
}

// The products of at most 16 tokens with the rows from `first` to `last`.
__attribute__((target("amx-tile"))) static void rows_by_amx(const char *matrix, i64 columns, i64 first, i64 last,
                                                            const char *tokens, i64 count, float *out, i64 outputs) {
    float sums[2 * EDGE * EDGE];
    shape_tiles(EDGE, count);
    for (i64 n = first, rows; n < last; n += rows) {
        const char *from = matrix + 2 * n * columns;
        rows = last - n < 2 * EDGE ? least_of(EDGE, last - n) : 2 * EDGE;
        if (rows < EDGE) shape_tiles(rows, count);
        if (rows > EDGE) products_of_tiles<2>(from, columns, tokens, count, sums);
        else products_of_tiles<1>(from, columns, tokens, count, sums);
        for (i64 b = 0; b < count; b++)
            for (i64 i = 0; i < rows; i++) out[b * outputs + n + i] = sums[i * count + b];
    }
    _tile_release();  // else every change of threads saves them
}

// Tokens `[count, columns]` as tiles hold them.
static void arrange_pairs(const char *tokens, i64 count, i64 columns, char *to) {
    for (i64 pair = 0; pair < columns / 2; pair++)
        for (i64 b = 0; b < count; b++, to += 4) std::memcpy(to, tokens + 2 * b * columns + 4 * pair, 4);
}
#endif

}  // namespace BPC_ISA
