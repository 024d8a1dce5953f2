/* Texts -> their letters in lower case, and the words that they make. The twin is decontamination/letters.py, where the
   rules are told. */

#include <stdint.h>
#include <string.h>

enum { LONGEST_WORD = 64 };

static uint64_t eight_at(const uint8_t *bytes) {
    uint64_t eight;
    memcpy(&eight, bytes, 8);
    return eight;
}

/* ASCII letters in lower case and digits, 0 for all else that is ASCII, what is beyond as it is. */
static void fold_ascii(const uint8_t *restrict raw, int64_t size, uint8_t *restrict folded) {
    for (int64_t at = 0; at < size; at++) {
        const uint8_t byte = raw[at], low = byte | 0x20;
        const uint8_t letter = (uint8_t)(low - 'a') < 26 ? low : 0;
        folded[at] = byte >= 0x80 || (uint8_t)(byte - '0') < 10 ? byte : letter;
    }
}

static void set_bit(uint64_t *bits, int64_t at) { bits[at >> 6] |= UINT64_C(1) << (at & 63); }

/* One character beyond ASCII: its letter, or zeros; its size. `borders`: where a character is a word of its own. */
static int64_t fold_character(uint8_t *at, int64_t place, int64_t left, const uint16_t *folds, const uint8_t *alone,
                              uint64_t *borders) {
    const int64_t size = *at < 0xC2 ? 1 : *at < 0xE0 ? 2 : *at < 0xF0 ? 3 : 4;
    if (size == 1 || size > left) return 1; /* not UTF-8 */
    uint32_t own = 1;
    if (size < 4) {
        const uint32_t code = size == 2 ? (at[0] & 0x1Fu) << 6 | (at[1] & 0x3Fu)
                                        : (at[0] & 0x0Fu) << 12 | (at[1] & 0x3Fu) << 6 | (at[2] & 0x3Fu);
        const uint32_t letter = folds[code];
        own = alone[code];
        if (!letter) {
            memset(at, 0, (size_t)size);
        } else if (letter != code) {
            at[0] = (uint8_t)(size == 2 ? 0xC0 | letter >> 6 : 0xE0 | letter >> 12);
            at[1] = (uint8_t)(0x80 | (size == 2 ? letter & 0x3F : letter >> 6 & 0x3F));
            if (size == 3) at[2] = (uint8_t)(0x80 | (letter & 0x3F));
        }
    }
    if (own) {
        set_bit(borders, place);
        set_bit(borders, place + size);
    }
    return size;
}

static void fold_beyond(uint8_t *folded, int64_t size, const uint16_t *folds, const uint8_t *alone, uint64_t *borders) {
    int64_t at = 0;
    while (at < size) {
        if (folded[at] >= 0x80) {
            at += fold_character(folded + at, at, size - at, folds, alone, borders);
            continue;
        }
        const uint64_t beyond = eight_at(folded + at) & UINT64_C(0x8080808080808080); /* the padding is zeros */
        at += beyond ? __builtin_ctzll(beyond) >> 3 : 8;
    }
}

/* A bit for each of 64 bytes that is not 0. */
static uint64_t letters_among(const uint8_t *folded) {
    uint64_t found = 0;
    for (int k = 0; k < 8; k++) {
        const uint64_t eight = eight_at(folded + 8 * k), low = UINT64_C(0x7F7F7F7F7F7F7F7F);
        const uint64_t tops = (((eight & low) + low) | eight) >> 7 & UINT64_C(0x0101010101010101);
        found |= (tops * UINT64_C(0x0102040810204080) >> 56) << 8 * k;
    }
    return found;
}

static int64_t count_bits(uint64_t bits) {
    bits -= bits >> 1 & UINT64_C(0x5555555555555555);
    bits = (bits & UINT64_C(0x3333333333333333)) + (bits >> 2 & UINT64_C(0x3333333333333333));
    return (int64_t)(((bits + (bits >> 4)) & UINT64_C(0x0F0F0F0F0F0F0F0F)) * UINT64_C(0x0101010101010101) >> 56);
}

/* Where words begin and end, in turns; how many edges. Eight are written at a time, as the end of a short loop is
   guessed wrong: up to seven behind the last mean nothing. */
static int64_t find_edges(const uint8_t *folded, int64_t size, const uint64_t *borders, uint32_t *edges) {
    int64_t count = 0;
    uint64_t before = 0; /* the last byte of the block before is a letter */
    for (int64_t base = 0; base <= size; base += 64) {
        const uint64_t letters = letters_among(folded + base), shifted = letters << 1 | before;
        const uint64_t inside = borders[base >> 6] & letters & shifted;
        uint64_t changes = letters ^ shifted;
        before = letters >> 63;
        if (inside) { /* one word ends and another begins */
            for (changes |= inside; changes; changes &= changes - 1) {
                const int bit = __builtin_ctzll(changes);
                edges[count++] = (uint32_t)(base + bit);
                if (inside >> bit & 1) edges[count++] = (uint32_t)(base + bit);
            }
            continue;
        }
        const int64_t stop = count + count_bits(changes);
        for (; count < stop; count += 8) {
            for (int k = 0; k < 8; k++) {
                edges[count + k] = (uint32_t)(base + __builtin_ctzll(changes | UINT64_C(1) << 63));
                changes &= changes - 1;
            }
        }
        count = stop;
    }
    return count;
}

/* Words of more than `LONGEST_WORD` bytes become several; how many words. From the last on, as each needs more room. */
static int64_t cut_long(uint32_t *edges, int64_t words) {
    uint32_t longest = 0;
    int64_t pieces = 0;
    for (int64_t word = 0; word < words; word++) {
        const uint32_t length = edges[2 * word + 1] - edges[2 * word];
        longest = length > longest ? length : longest;
    }
    if (longest <= LONGEST_WORD) return words;
    for (int64_t word = 0; word < words; word++)
        pieces += (edges[2 * word + 1] - edges[2 * word] + LONGEST_WORD - 1) / LONGEST_WORD;
    for (int64_t word = words - 1, to = pieces; word >= 0; word--) {
        const uint32_t start = edges[2 * word];
        uint32_t stop = edges[2 * word + 1];
        while (stop > start) {
            const uint32_t piece = (stop - start - 1) % LONGEST_WORD + 1;
            to--;
            edges[2 * to + 1] = stop;
            edges[2 * to] = stop - piece;
            stop -= piece;
        }
    }
    return pieces;
}

/* `folded`: room for `size` bytes and 128 more, which become zeros; `borders`: for `size` bits and 64 more; `edges`: for
   `size` + 2 `texts` + 8. How many words. */
int64_t milldam_letters(const uint8_t *raw, int64_t size, const int64_t *offsets, int64_t texts, const uint16_t *folds,
                        const uint8_t *alone, uint8_t *folded, uint64_t *borders, uint32_t *edges) {
    memset(borders, 0, (size_t)(size / 64 + 1) * 8);
    memset(folded + size, 0, 128);
    fold_ascii(raw, size, folded);
    for (int64_t text = 0; text <= texts; text++) set_bit(borders, offsets[text] - offsets[0]);
    fold_beyond(folded, size, folds, alone, borders);
    return cut_long(edges, find_edges(folded, size, borders, edges) / 2);
}
