/* Characters of text: counted, found. */

#include <string.h>

#include "arrays.h"

enum { SOME = 240 }; /* so few that a byte can count them, and the compiler takes 16 at a time */

/* The characters of texts that lie end to end in valid UTF-8: each byte but those that continue one. */
int64_t milldam_count_characters(const uint8_t *bytes, int64_t size, const int64_t *offsets, int64_t offsets_count,
                                 int64_t *counts, int64_t texts) {
    NEEDS(offsets_count == texts + 1 && lie_within(offsets, offsets_count, size));
    for (int64_t text = 0; text < texts; text++) {
        int64_t total = 0;
        for (int64_t start = offsets[text]; start < offsets[text + 1]; start += SOME) {
            const int64_t stop = offsets[text + 1] - start < SOME ? offsets[text + 1] : start + SOME;
            uint8_t found = 0;
            for (int64_t at = start; at < stop; at++) found += (bytes[at] & 0xc0) != 0x80;
            total += found;
        }
        counts[text] = total;
    }
    return texts;
}

/* Whether a character that begins in bytes[at:end] has its bit set. */
static int holds_one(const uint8_t *bytes, int64_t at, int64_t end, int64_t stop, const uint8_t *bits) {
    for (; at < end; at++) {
        const uint32_t first = bytes[at];
        const int more = first < 0xe0 ? 1 : first < 0xf0 ? 2 : 3;
        if (first < 0xc0 || more >= stop - at) continue;
        uint32_t code = first & (0x7fu >> (more + 1));
        for (int next = 1; next <= more; next++) code = code << 6 | (bytes[at + next] & 0x3fu);
        if (bits[code >> 3] >> (code & 7) & 1) return 1;
    }
    return 0;
}

/* Which texts, end to end in UTF-8, hold a character that is not ASCII and has its bit set. `pairs`: what such characters
   begin with, 1 at first byte + 256 * second. `bits`: one for whatever four bytes can spell. */
int64_t milldam_find_characters(const uint8_t *bytes, int64_t size, const int64_t *offsets, int64_t offsets_count,
                                const uint8_t *pairs, int64_t pairs_size, const uint8_t *bits, int64_t bits_size,
                                uint8_t *found, int64_t texts) {
    enum { STEP = 32, CODES = 1 << 21 };
    NEEDS(offsets_count == texts + 1 && lie_within(offsets, offsets_count, size));
    NEEDS(pairs_size >= 1 << 16 && bits_size >= CODES / 8);
    int64_t total = 0;
    for (int64_t text = 0; text < texts; text++) {
        const int64_t stop = offsets[text + 1];
        found[text] = 0;
        for (int64_t at = offsets[text], end; at < stop && !found[text]; at = end) {
            uint64_t words[STEP / 8] = {0};
            end = stop - at < STEP ? stop : at + STEP;
            memcpy(words, bytes + at, (size_t)(end - at));
            if (!((words[0] | words[1] | words[2] | words[3]) & 0x8080808080808080u)) continue;
            const int64_t last = end < stop ? end : end - 1;
            uint8_t likely = 0;
            for (int64_t one = at; one < last; one++) likely |= pairs[bytes[one] | bytes[one + 1] << 8];
            found[text] = likely && holds_one(bytes, at, end, stop, bits);
        }
        total += found[text];
    }
    return total;
}
