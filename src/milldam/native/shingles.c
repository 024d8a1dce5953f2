/* Texts -> hashes of their word n-grams, and what near-dedup keeps of these: signatures and sketches.

   The rules of words and the hashes are those of dedup/minhash.py. Texts are valid UTF-8; what is not is read as
   something, within its bounds. `lower` has the lower case of each character below `LOWERED`. */

#include "arrays.h"

#include <stddef.h>
#include <string.h>

#define LOWERED 0x20000
#define LONGEST_WORD 64
#define BLOCK 64
#define MOST_NGRAM 100
#define WORD_FACTOR 0x9FB21C651E98DF25u
#define ORDER_FACTOR 0xD6E8FEB86659FD93u
#define EACH(byte) (0x0101010101010101u * (byte))
#define EMPTY UINT64_MAX
#define STRETCH (1 << 18)

/* A text that is read from left to right: its last words, and the word that may go on. */
struct reader {
    uint64_t words, place, chain, out_factor; /* words so far; where the oldest of `last` is; the n-gram; factor^ngram */
    uint64_t hash, block, length;             /* of the open word */
    uint64_t last[MOST_NGRAM];
};

/* What takes the hashes of n-grams: the end of an array, or the smallest of each bin. */
struct sink {
    uint64_t *end, *minima;
    uint64_t bins;
};

static inline uint64_t fold(uint64_t value) {
    value ^= value >> 32;
    value *= WORD_FACTOR;
    return value ^ value >> 29;
}

static inline void give(struct sink *sink, uint64_t chain) {
    uint64_t hash = fold(chain) * ORDER_FACTOR;
    hash ^= hash >> 32;
    if (!sink->minima) {
        *sink->end++ = hash;
        return;
    }
    uint64_t *smallest = sink->minima + ((hash >> 32) * sink->bins >> 32);
    *smallest = hash < *smallest ? hash : *smallest; /* no branch to guess wrong */
}

static inline void add_word(struct reader *reader, uint64_t hash, uint64_t ngram, struct sink *sink) {
    uint64_t *oldest = reader->last + reader->place;
    reader->place = reader->place + 1 == ngram ? 0 : reader->place + 1;
    /* The first of the last n words leaves the sum; before there are n, zeros leave it. */
    reader->chain = reader->chain * ORDER_FACTOR + hash - *oldest * reader->out_factor;
    *oldest = hash;
    if (++reader->words >= ngram) give(sink, reader->chain);
}

static inline void end_word(struct reader *reader, uint64_t ngram, struct sink *sink) {
    if (!reader->length) return;
    if (reader->length % 8) reader->hash = fold(reader->hash * ORDER_FACTOR + reader->block);
    add_word(reader, reader->hash, ngram, sink);
    reader->hash = reader->block = reader->length = 0;
}

static inline void add_byte(struct reader *reader, uint8_t byte, uint64_t ngram, struct sink *sink) {
    reader->block |= (uint64_t)byte << reader->length % 8 * 8;
    if (++reader->length % 8) return;
    reader->hash = fold(reader->hash * ORDER_FACTOR + reader->block);
    reader->block = 0;
    if (reader->length == LONGEST_WORD) end_word(reader, ngram, sink);
}

static inline int is_mark(uint32_t character) {
    return character < 0xC0 || (character >= 0x2000 && character < 0x2C00);
}

/* Scripts without spaces: each character is a word. */
static inline int stands_alone(uint32_t c) {
    return (c >= 0x3000 && c < 0xE000) || (c >= 0x0E00 && c < 0x10C0) || (c >= 0x1780 && c < 0x1800) || c >= 0x10000;
}

/* The character at the start of some bytes, of which the first is not ASCII; how many bytes it has. */
static inline int decode(const uint8_t *text, int64_t size, uint32_t *character) {
    const int bytes = text[0] >= 0xF0 ? 4 : text[0] >= 0xE0 ? 3 : 2;
    *character = text[0] & (0xFF >> (bytes + 1));
    for (int k = 1; k < bytes; k++) *character = *character << 6 | (k < size ? text[k] & 0x3F : 0);
    return bytes;
}

static inline void add_character(struct reader *reader, uint32_t c, uint64_t ngram, struct sink *sink) {
    const int alone = stands_alone(c);
    if (alone || is_mark(c)) end_word(reader, ngram, sink);
    if (is_mark(c)) return;
    if (c < 0x800) add_byte(reader, 0xC0 | c >> 6, ngram, sink);
    else {
        if (c < 0x10000) add_byte(reader, 0xE0 | c >> 12, ngram, sink);
        else {
            add_byte(reader, 0xF0 | (c >> 18 & 7), ngram, sink);
            add_byte(reader, 0x80 | (c >> 12 & 0x3F), ngram, sink);
        }
        add_byte(reader, 0x80 | (c >> 6 & 0x3F), ngram, sink);
    }
    add_byte(reader, 0x80 | (c & 0x3F), ngram, sink);
    if (alone) end_word(reader, ngram, sink);
}

static inline int is_word_byte(uint8_t byte) {
    return (uint8_t)((byte | 0x20) - 'a') < 26 || (uint8_t)(byte - '0') < 10;
}

/* The upper bit of each of eight bytes that is no ASCII letter or digit. */
static inline uint64_t other_bytes(uint64_t bytes) {
    const uint64_t plain = bytes & EACH(0x7F), small = plain | EACH(0x20);
    const uint64_t letters = (small + EACH(0x80 - 'a')) & ~(small + EACH(0x7F - 'z'));
    const uint64_t digits = (plain + EACH(0x80 - '0')) & ~(plain + EACH(0x7F - '9'));
    return ~((letters | digits) & ~bytes) & EACH(0x80);
}

/* The upper bits of eight bytes, as one byte. */
static inline uint64_t upper_bits(uint64_t bytes) {
    return (bytes & EACH(0x80)) * 0x0002040810204081u >> 56;
}

static inline uint64_t load(const uint8_t *text) {
    uint64_t bytes;
    memcpy(&bytes, text, 8);
    return bytes;
}

/* The words that begin and end within the next `BLOCK` bytes, before any byte that is not ASCII; how many bytes are done
   with. What is where follows from bits, so that a word need not wait for the one before it. */
static inline int64_t read_block(struct reader *reader, const uint8_t *text, uint64_t ngram, struct sink *sink) {
    uint64_t letters = 0, foreign = 0;
    for (int k = 0; k < 8; k++) {
        const uint64_t bytes = load(text + 8 * k);
        letters |= upper_bits(~other_bytes(bytes)) << 8 * k;
        foreign |= upper_bits(bytes) << 8 * k;
    }
    const int stop = foreign ? __builtin_ctzll(foreign) : BLOCK;
    if (foreign) letters &= (foreign & -foreign) - 1;
    while (letters) {
        const int start = __builtin_ctzll(letters);
        const uint64_t after = letters + (letters & -letters); /* the first run of ones carries into the bit behind it */
        const int end = after ? __builtin_ctzll(after) : BLOCK;
        if (end >= stop) return start;
        uint64_t hash = 0;
        for (int at = start; at < end; at += 8) {
            const int more = end - at < 8 ? end - at : 8;
            hash = fold(hash * ORDER_FACTOR + ((load(text + at) | EACH(0x20)) & UINT64_MAX >> (64 - 8 * more)));
        }
        add_word(reader, hash, ngram, sink);
        letters &= after;
    }
    return stop;
}

static inline void read_text(struct reader *reader, const uint8_t *text, int64_t size, uint64_t ngram,
                             const uint32_t *lower, struct sink *sink) {
    int64_t at = 0, one_by_one = 0; /* until where bytes are read one by one */
    while (at < size) {
        if (!reader->length && at >= one_by_one && size - at >= BLOCK + 8) {
            const int64_t done = read_block(reader, text + at, ngram, sink);
            at += done;
            one_by_one = done < 8 ? at + BLOCK : at + 1;
            continue;
        }
        const uint8_t byte = text[at];
        if (byte < 0x80) {
            if (is_word_byte(byte)) add_byte(reader, byte | 0x20, ngram, sink);
            else end_word(reader, ngram, sink);
            at++;
            continue;
        }
        uint32_t character;
        at += decode(text + at, size - at, &character);
        if (character < LOWERED) character = lower[character];
        if (character >= 0x80) add_character(reader, character, ngram, sink);
        else add_byte(reader, character, ngram, sink); /* of the Kelvin sign, say */
    }
}

static inline void begin(struct reader *reader, uint64_t ngram) {
    memset(reader, 0, offsetof(struct reader, last) + ngram * sizeof(uint64_t));
    reader->out_factor = 1;
    for (uint64_t k = 0; k < ngram; k++) reader->out_factor *= ORDER_FACTOR;
}

/* A text of fewer words than an n-gram has one n-gram of all. */
static inline void end_text(struct reader *reader, uint64_t ngram, struct sink *sink) {
    end_word(reader, ngram, sink);
    if (reader->words && reader->words < ngram) give(sink, reader->chain);
}

static inline int can_read(const int64_t *offsets, int64_t offsets_count, int64_t size, int64_t ngram, int64_t lowered) {
    return lie_within(offsets, offsets_count, size) && ngram >= 1 && ngram <= MOST_NGRAM && lowered >= LOWERED;
}

/* Signatures (dedup/minhash.py): `minima` and `best` have room for a number for each bin; `order` has for each bin whom it
   asks, `ranks` for each bin when each other asks it. A text without words gets 255s. */
struct bins {
    int64_t count;
    const int16_t *order, *ranks;
    const uint64_t *factors;
    uint64_t *minima;
    int16_t *best;
};

static void borrow_by_asking(const struct bins *bins, int64_t bin) {
    const int16_t *asked = bins->order + bin * bins->count;
    for (int64_t k = 1; k < bins->count && bins->minima[*asked] == EMPTY; k++) asked++;
    bins->best[bin] = *asked;
}

static void borrow_by_rank(const struct bins *bins) {
    int16_t *restrict best = bins->best;
    for (int64_t k = 0; k < bins->count; k++) best[k] = INT16_MAX;
    for (int64_t lender = 0; lender < bins->count; lender++) {
        if (bins->minima[lender] == EMPTY) continue;
        const int16_t *restrict ranks = bins->ranks + lender * bins->count;
        for (int64_t k = 0; k < bins->count; k++) best[k] = ranks[k] < best[k] ? ranks[k] : best[k];
    }
    for (int64_t k = 0; k < bins->count; k++) best[k] = bins->order[k * bins->count + best[k]];
}

static void store(const struct bins *bins, uint8_t *signature) {
    int64_t filled = 0;
    for (int64_t k = 0; k < bins->count; k++) filled += bins->minima[k] != EMPTY;
    if (!filled) {
        memset(signature, 0xFF, bins->count);
        return;
    }
    /* Two ways to the same result: a step for each filled bin and bin, or some steps for each empty one. */
    if (filled < bins->count * 2 / 5) borrow_by_rank(bins);
    else for (int64_t k = 0; k < bins->count; k++) borrow_by_asking(bins, k);
    for (int64_t k = 0; k < bins->count; k++) {
        const uint8_t value = bins->minima[bins->best[k]] * bins->factors[k] >> 56;
        signature[k] = value == 0xFF ? 0xFE : value;
    }
}

static int bins_fit(const int16_t *order, int64_t order_count, const int16_t *ranks, int64_t ranks_count, int64_t size) {
    int beyond = size < 1 || size > INT16_MAX || order_count != size * size || ranks_count != size * size;
    for (int64_t k = 0; !beyond && k < size * size; k += size)
        for (int64_t at = k; at < k + size; at++) beyond |= (uint16_t)order[at] >= size || (uint16_t)ranks[at] >= size;
    return !beyond;
}

int64_t milldam_signatures(const uint8_t *texts, int64_t bytes, const int64_t *offsets, int64_t offsets_count,
                           int64_t ngram, const uint32_t *lower, int64_t lowered, const int16_t *order,
                           int64_t order_count, const int16_t *ranks, int64_t ranks_count, const uint64_t *factors,
                           int64_t size, uint64_t *minima, int64_t minima_count, int16_t *best, int64_t best_count,
                           uint8_t *signatures, int64_t signatures_count) {
    const int64_t count = offsets_count - 1;
    NEEDS(can_read(offsets, offsets_count, bytes, ngram, lowered));
    NEEDS(bins_fit(order, order_count, ranks, ranks_count, size) && minima_count == size && best_count == size);
    NEEDS(signatures_count == count * size);
    const struct bins bins = {size, order, ranks, factors, minima, best};
    for (int64_t k = 0; k < count; k++) {
        struct sink sink = {0, minima, size};
        struct reader reader;
        begin(&reader, ngram);
        for (int64_t bin = 0; bin < size; bin++) minima[bin] = EMPTY;
        read_text(&reader, texts + offsets[k], offsets[k + 1] - offsets[k], ngram, lower, &sink);
        end_text(&reader, ngram, &sink);
        store(&bins, signatures + k * size);
    }
    return count;
}

/* Sketches (dedup/sketches.py). */

static void insertion_sort(uint32_t *values, int64_t count) {
    for (int64_t k = 1; k < count; k++) {
        const uint32_t value = values[k];
        int64_t at = k;
        for (; at > 0 && values[at - 1] > value; at--) values[at] = values[at - 1];
        values[at] = value;
    }
}

/* By bytes, the lowest first. Hashes are spread evenly: of some thousands few have the same upper half, so that sorting by
   the upper half leaves little to the insertions. */
static void sort(uint32_t *values, uint32_t *spare, int64_t count) {
    const int first = count < 1 << 14 ? 2 : 0;
    for (int byte = first; byte < 4 && count >= 48; byte++) {
        uint32_t places[256] = {0}, before = 0;
        for (int64_t k = 0; k < count; k++) places[values[k] >> 8 * byte & 0xFF]++;
        for (int k = 0; k < 256; k++) {
            const uint32_t here = places[k];
            places[k] = before;
            before += here;
        }
        for (int64_t k = 0; k < count; k++) spare[places[values[k] >> 8 * byte & 0xFF]++] = values[k];
        uint32_t *const swapped = values;
        values = spare;
        spare = swapped;
    }
    insertion_sort(values, count);
}

/* Sorted, each once, at most `most` of them; how many these are. */
static int64_t smallest(uint32_t *values, uint32_t *spare, int64_t count, int64_t most) {
    int64_t kept = 0;
    sort(values, spare, count);
    for (int64_t k = 0; k < count; k++) {
        values[kept] = values[k];
        kept += k + 1 == count || values[k] != values[k + 1];
    }
    return kept < most ? kept : most;
}

/* Of each text the upper halves of its hashes, ascending, each once, at most `most`; how many in all. A text is read in
   stretches: `hashes` and `values` have room for `most`, and all words of the texts or, of a larger one, of a stretch. */
int64_t milldam_sketches(const uint8_t *texts, int64_t size, const int64_t *offsets, int64_t offsets_count,
                         int64_t ngram, const uint32_t *lower, int64_t lowered, int64_t most, uint64_t *hashes,
                         int64_t hashes_count, uint32_t *values, int64_t values_count, int64_t *counts, int64_t count) {
    NEEDS(can_read(offsets, offsets_count, size, ngram, lowered) && offsets_count == count + 1 && most >= 1);
    int64_t room = most + 2 * count;
    for (int64_t k = 0; k < count; k++) {
        const int64_t bytes = offsets[k + 1] - offsets[k];
        room += bytes <= STRETCH ? bytes / 2 : STRETCH / 2 + most;
    }
    NEEDS(hashes_count >= room && values_count >= room);
    uint32_t *const first = values;
    for (int64_t k = 0; k < count; k++) {
        struct reader reader;
        int64_t kept = 0;
        begin(&reader, ngram);
        for (int64_t at = offsets[k], stop; at < offsets[k + 1]; at = stop) {
            struct sink sink = {hashes, 0, 0};
            stop = offsets[k + 1] - at > STRETCH ? at + STRETCH : offsets[k + 1];
            while (stop < offsets[k + 1] && stop > at + 1 && (texts[stop] & 0xC0) == 0x80) stop--;
            read_text(&reader, texts + at, stop - at, ngram, lower, &sink);
            if (stop == offsets[k + 1]) end_text(&reader, ngram, &sink);
            const uint64_t bound = kept < most ? UINT64_C(1) << 32 : values[kept - 1];
            int64_t found = kept;
            for (const uint64_t *hash = hashes; hash < sink.end; hash++) {
                values[found] = *hash >> 32;
                found += *hash >> 32 < bound;
            }
            kept = smallest(values, (uint32_t *)hashes, found, most);
        }
        counts[k] = kept;
        values += kept;
    }
    return values - first;
}
