/* Numbers of 64 bits, sorted by their bytes: in one pass for each byte that differs at all. */

#include "arrays.h"

#include <string.h>

int64_t milldam_sort(uint64_t *keys, int64_t count, uint64_t *spare, int64_t spare_count) {
    NEEDS(spare_count >= count);
    int64_t places[8][256] = {{0}};
    uint64_t *from = keys, *to = spare;
    for (int64_t k = 0; k < count; k++)
        for (int byte = 0; byte < 8; byte++) places[byte][keys[k] >> 8 * byte & 0xFF]++;
    for (int byte = 0; byte < 8; byte++) {
        int64_t before = 0, *place = places[byte];
        if (count && place[keys[0] >> 8 * byte & 0xFF] == count) continue;
        for (int k = 0; k < 256; k++) {
            const int64_t here = place[k];
            place[k] = before;
            before += here;
        }
        for (int64_t k = 0; k < count; k++) to[place[from[k] >> 8 * byte & 0xFF]++] = from[k];
        uint64_t *const swapped = from;
        from = to;
        to = swapped;
    }
    if (from != keys) memcpy(keys, from, count * sizeof(uint64_t));
    return count;
}
