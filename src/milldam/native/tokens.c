/* Ids of documents -> tokens as they are stored: special tokens around each document, ids narrowed. */

#include "arrays.h"

/* `bos` and `eos`: below zero there is none; a document that has them already gets no second one, an empty one none. `out`
   has room for two more a document, `width` bytes each. `lengths` become those with them; gives how many tokens there are. */
int64_t milldam_place_tokens(const uint32_t *ids, int64_t ids_count, int64_t *lengths, int64_t documents, int64_t bos,
                             int64_t eos, int64_t width, uint8_t *out, int64_t bytes) {
    NEEDS((width == 2 || width == 4) && bytes / width >= ids_count + 2 * documents);
    for (int64_t document = 0, left = ids_count; document < documents; document++)
        NEEDS(lengths[document] >= 0 && (left -= lengths[document]) >= 0);
    uint16_t *narrow = (uint16_t *)(void *)out;
    uint32_t *wide = (uint32_t *)(void *)out;
    int64_t placed = 0;
    for (int64_t document = 0; document < documents; document++) {
        const int64_t count = lengths[document], first = placed;
        const int begins = count > 0 && bos >= 0 && ids[0] != (uint32_t)bos;
        const int ends = count > 0 && eos >= 0 && ids[count - 1] != (uint32_t)eos;
        if (width == 2) {
            if (begins) narrow[placed++] = (uint16_t)bos;
            for (int64_t at = 0; at < count; at++) narrow[placed + at] = (uint16_t)ids[at];
            placed += count;
            if (ends) narrow[placed++] = (uint16_t)eos;
        } else {
            if (begins) wide[placed++] = (uint32_t)bos;
            for (int64_t at = 0; at < count; at++) wide[placed + at] = ids[at];
            placed += count;
            if (ends) wide[placed++] = (uint32_t)eos;
        }
        ids += count;
        lengths[document] = placed - first;
    }
    return placed;
}
