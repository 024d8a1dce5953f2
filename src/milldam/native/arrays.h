/* How arrays come to a kernel: each with the number of its entries behind it. A kernel refuses before it reads or writes
   beyond one; Python makes an error of that. */

#include <stdint.h>

#define REFUSED INT64_MIN
#define NEEDS(condition) \
    if (!(condition)) return REFUSED

/* Whether `offsets`, one more than there are texts, ascend within so many bytes. */
static inline int lie_within(const int64_t *offsets, int64_t offsets_count, int64_t bytes) {
    if (offsets_count < 1 || offsets[0] < 0 || offsets[offsets_count - 1] > bytes) return 0;
    int descends = 0;
    for (int64_t k = 1; k < offsets_count; k++) descends |= offsets[k] < offsets[k - 1];
    return !descends;
}

/* Whether all indices are those of an array of `size` entries. */
static inline int are_below(const int64_t *indices, int64_t indices_count, int64_t size) {
    int beyond = 0;
    for (int64_t k = 0; k < indices_count; k++) beyond |= (uint64_t)indices[k] >= (uint64_t)size;
    return !beyond;
}
