/* Words of documents beside the seeds of passages: where letters are equal. The twin is decontamination/scanning.py. */

#include <stdint.h>
#include <string.h>

enum { SEED_LETTERS = 16, REMEMBERED = 256 };
static const uint64_t WORD_FACTOR = UINT64_C(0x9FB21C651E98DF25), ORDER_FACTOR = UINT64_C(0xD6E8FEB86659FD93);
static const uint64_t BASE = UINT64_C(0x9E3779B97F4A7C15), INVERSE = UINT64_C(0xF1DE83E19937733D);

typedef struct {
    const uint8_t *folded;
    const uint32_t *edges;
    int64_t words;
} Words;

typedef struct { /* of what is equal, so that a seed inside of it is not looked at again */
    int64_t passage, beside, stop;
} Region;

/* The first eight letters of a word. */
static uint64_t block_of(const Words *words, int64_t word) {
    uint64_t block;
    const uint32_t start = words->edges[2 * word], length = words->edges[2 * word + 1] - start;
    memcpy(&block, words->folded + start, 8);
    return length >= 8 ? block : block & ((UINT64_C(1) << 8 * length) - 1);
}

static int may_hold(const uint64_t *bits, int64_t shift, uint64_t hash) {
    const uint64_t two = UINT64_C(1) << (hash >> 32 & 63) | UINT64_C(1) << (hash >> 38 & 63);
    return (bits[hash >> shift] & two) == two;
}

static uint64_t key_of(uint64_t low, uint64_t high) {
    uint64_t key = low * BASE;
    key = ((key ^ key >> 29) + high) * INVERSE;
    return key ^ key >> 32;
}

/* A number for the sixteen letters from a word on, whatever lies between words. */
static uint64_t letters_key(const Words *words, int64_t word) {
    uint8_t letters[2 * SEED_LETTERS];
    int64_t filled = 0;
    for (; word < words->words && filled < SEED_LETTERS; word++) {
        memcpy(letters + filled, words->folded + words->edges[2 * word], SEED_LETTERS);
        filled += words->edges[2 * word + 1] - words->edges[2 * word];
    }
    if (filled < SEED_LETTERS) memset(letters + filled, 0, (size_t)(SEED_LETTERS - filled));
    uint64_t low, high;
    memcpy(&low, letters, 8);
    memcpy(&high, letters + 8, 8);
    return key_of(low, high);
}

/* The first of the seeds that have this key or a larger one. */
static int64_t first_seed(const uint64_t *keys, int64_t seeds, uint64_t key) {
    int64_t low = 0;
    while (seeds > 0) {
        const int64_t half = seeds / 2;
        if (keys[low + half] < key) {
            low += half + 1;
            seeds -= half + 1;
        } else {
            seeds = half;
        }
    }
    return low;
}

/* How many letters from a place on are those from a letter of a passage on; and where the last of them ends. */
static int64_t equal_right(const uint8_t *folded, int64_t place, int64_t high, const uint8_t *letters, int64_t left,
                           int64_t *stop) {
    int64_t equal = 0;
    for (*stop = place; place < high; place++) {
        if (!folded[place]) continue;
        if (equal == left || folded[place] != letters[equal]) break;
        equal++;
        *stop = place + 1;
    }
    return equal;
}

static int64_t equal_left(const uint8_t *folded, int64_t place, int64_t low, const uint8_t *letters, int64_t left) {
    int64_t equal = 0;
    while (place-- > low) {
        if (!folded[place]) continue;
        if (equal == left || folded[place] != letters[-1 - equal]) break;
        equal++;
    }
    return equal;
}

/* Four numbers for each place where at least the letters of a passage's shortest n-gram are equal: the word of the
   document and the seed that led there, and how many letters are equal before and from there on. How many there are; no
   more than `capacity` are written. `kinds`: 2 where some seeds go by their two words instead of sixteen letters. */
int64_t milldam_regions(const uint8_t *folded, const uint32_t *edges, int64_t words, const int64_t *offsets,
                        const uint64_t *pair_bits, int64_t pair_shift, const uint64_t *key_bits, int64_t key_shift,
                        int64_t kinds, const uint64_t *seed_keys, const int64_t *seed_letters,
                        const int64_t *seed_passages, int64_t seeds, const uint8_t *letters, const int64_t *bounds,
                        const int64_t *shortest, int64_t *found, int64_t capacity) {
    const Words here = {folded, edges, words};
    Region regions[REMEMBERED];
    memset(regions, 0, sizeof regions);
    int64_t count = 0, text = 0, before = 0;
    uint64_t block = words ? block_of(&here, 0) : 0;
    for (int64_t word = 0; word < words; word++) {
        const uint64_t next = word + 1 < words ? block_of(&here, word + 1) : 0;
        const uint64_t own = block, pair = own * ORDER_FACTOR + next * WORD_FACTOR;
        const int64_t place = edges[2 * word], letters_before = before;
        block = next;
        before += edges[2 * word + 1] - place;
        if (!may_hold(pair_bits, pair_shift, pair)) continue;
        for (int64_t kind = 0; kind < kinds; kind++) {
            const uint64_t key = kind ? key_of(own, ~next) : letters_key(&here, word);
            if (!may_hold(key_bits, key_shift, key)) continue;
            for (int64_t seed = first_seed(seed_keys, seeds, key); seed < seeds && seed_keys[seed] == key; seed++) {
                const int64_t passage = seed_passages[seed], letter = seed_letters[seed];
                const int64_t beside = letters_before - letter;
                Region *region = regions + ((uint64_t)(passage * 31 + beside) % REMEMBERED);
                if (region->passage == passage && region->beside == beside && place < region->stop) continue;
                while (offsets[text + 1] - offsets[0] <= place) text++;
                const int64_t low = offsets[text] - offsets[0], high = offsets[text + 1] - offsets[0];
                int64_t stop;
                const int64_t right =
                    equal_right(folded, place, high, letters + letter, bounds[passage + 1] - letter, &stop);
                const int64_t left = equal_left(folded, place, low, letters + letter, letter - bounds[passage]);
                *region = (Region){passage, beside, stop};
                if (left + right < shortest[passage]) continue;
                if (count < capacity) {
                    const int64_t numbers[4] = {word, seed, left, right};
                    memcpy(found + 4 * count, numbers, sizeof numbers);
                }
                count++;
            }
        }
    }
    return count;
}
