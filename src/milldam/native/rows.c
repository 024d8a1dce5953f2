/* Packed rows: pieces of documents, out of the tokens of a store -> the arrays of a batch, in one pass. */

#include "arrays.h"

#include <string.h>

enum { NO_LOSS = -100 };
enum { SHIFTED = 0, SAME = 1, SAME_UNMASKED = 2 };
/* Labels: the next token; the token itself but for the first of a piece; the token itself. */

typedef struct {
    int64_t place; /* of its first token; below zero it is padding, with -1 - place */
    int64_t length, document;
    int64_t goes_on; /* whether the token behind it is its last label */
} Piece;

/* The tokens of all pieces; below zero: one of them does not lie within the tokens of the store. */
static int64_t tokens_of(const int64_t *table, int64_t pieces, int64_t form, int64_t tokens) {
    int64_t total = 0;
    for (int64_t number = 0; number < pieces; number++) {
        Piece piece;
        memcpy(&piece, table + 4 * number, sizeof piece);
        const int64_t behind = form == SHIFTED && piece.goes_on && piece.length > 0;
        if (piece.length < 0 || piece.length > INT32_MAX) return -1;
        if (piece.place >= 0 && piece.place > tokens - piece.length - behind) return -1;
        total += piece.length;
    }
    return total;
}

/* The arrays but `borders` have an entry for each token of the pieces; `borders` has one more than there are pieces. Gives
   the length of the longest piece. */
#define FILL_ROWS(NAME, Token, Number)                                                                                 \
    int64_t NAME(const Token *tokens, int64_t tokens_count, const int64_t *table, int64_t table_count, int64_t form,   \
                 Number *ids, int64_t size, Number *labels, int64_t labels_count, Number *positions,                   \
                 int64_t positions_count, int64_t *documents, int64_t documents_count, uint8_t *mask,                  \
                 int64_t mask_count, int32_t *borders, int64_t borders_count) {                                        \
        const int64_t count = table_count / 4;                                                                         \
        NEEDS(table_count == 4 * count && borders_count == count + 1);                                                 \
        NEEDS(tokens_of(table, count, form, tokens_count) == size && size <= INT32_MAX);                               \
        NEEDS(labels_count == size && positions_count == size && documents_count == size && mask_count == size);       \
        int64_t longest = 0, begin = 0;                                                                                \
        for (int64_t number = 0; number < count; number++) {                                                           \
            Piece piece;                                                                                               \
            memcpy(&piece, table + 4 * number, sizeof piece);                                                          \
            const int64_t length = piece.length;                                                                       \
            borders[number] = (int32_t)begin;                                                                          \
            if (length > longest) longest = length;                                                                    \
            for (int64_t at = 0; at < length; at++) positions[at] = (Number)at;                                        \
            for (int64_t at = 0; at < length; at++) documents[at] = piece.document;                                    \
            if (piece.place < 0) {                                                                                     \
                for (int64_t at = 0; at < length; at++) ids[at] = (Number)(-1 - piece.place);                          \
                for (int64_t at = 0; at < length; at++) labels[at] = NO_LOSS;                                          \
                memset(mask, 0, (size_t)length);                                                                       \
            } else if (length > 0) {                                                                                   \
                const Token *from = tokens + piece.place;                                                              \
                for (int64_t at = 0; at < length; at++) ids[at] = (Number)from[at];                                    \
                memset(mask, 1, (size_t)length);                                                                       \
                if (form == SHIFTED) {                                                                                 \
                    for (int64_t at = 0; at < length - 1; at++) labels[at] = (Number)from[at + 1];                     \
                    labels[length - 1] = piece.goes_on ? (Number)from[length] : NO_LOSS;                               \
                    mask[length - 1] = piece.goes_on != 0;                                                             \
                } else {                                                                                               \
                    for (int64_t at = 0; at < length; at++) labels[at] = (Number)from[at];                             \
                    if (form == SAME) labels[0] = NO_LOSS, mask[0] = 0;                                                \
                }                                                                                                      \
            }                                                                                                          \
            begin += length;                                                                                           \
            ids += length, labels += length, positions += length, documents += length, mask += length;                 \
        }                                                                                                              \
        borders[count] = (int32_t)begin;                                                                               \
        return longest;                                                                                                \
    }

FILL_ROWS(milldam_fill_rows_uint16_int64, uint16_t, int64_t)
FILL_ROWS(milldam_fill_rows_uint16_int32, uint16_t, int32_t)
FILL_ROWS(milldam_fill_rows_int32_int64, int32_t, int64_t)
FILL_ROWS(milldam_fill_rows_int32_int32, int32_t, int32_t)
