/* Bytes of text, counted. */

#include "arrays.h"

enum { SOME = 240 }; /* so few that a byte can count them, and the compiler takes 16 at a time */

int64_t milldam_count_byte(const uint8_t *bytes, int64_t size, int64_t wanted) {
    int64_t total = 0;
    for (int64_t start = 0; start < size; start += SOME) {
        const int64_t stop = size - start < SOME ? size : start + SOME;
        uint8_t found = 0;
        for (int64_t at = start; at < stop; at++) found += bytes[at] == (uint8_t)wanted;
        total += found;
    }
    return total;
}

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
