/* Words of documents beside the seeds of passages: where letters are equal. The twin is decontamination/scanning.py. */

#include <stdint.h>
#include <string.h>

enum { SEED_LETTERS = 16, REMEMBERED = 4096, AT_ONCE = 1024 };
static const uint64_t WORD_FACTOR = UINT64_C(0x9FB21C651E98DF25), ORDER_FACTOR = UINT64_C(0xD6E8FEB86659FD93);
static const uint64_t BASE = UINT64_C(0x9E3779B97F4A7C15), INVERSE = UINT64_C(0xF1DE83E19937733D);

typedef struct {
    const uint8_t *folded;
    const uint32_t *edges;
    int64_t words;
} Words;

typedef struct {
    const uint64_t *pair_bits, *key_bits, *keys;
    int64_t pair_shift, key_shift;
    const int64_t *letters, *passages;
    int64_t count;
} Seeds;

typedef struct {
    const uint8_t *letters;
    const int64_t *bounds, *shortest;
} Passages;

typedef struct { /* of what is equal, so that a seed inside of it is not looked at again */
    int64_t passage, beside, stop;
} Region;

typedef struct { /* a word that may begin a seed */
    int64_t word, letters_before;
} Likely;

/* The first eight letters of a word. */
static uint64_t block_of(const Words *words, int64_t word) {
    uint64_t block;
    const uint32_t start = words->edges[2 * word];
    const int32_t missing = 8 - (int32_t)(words->edges[2 * word + 1] - start), behind = 8 * (missing & ~(missing >> 31));
    memcpy(&block, words->folded + start, 8);
    return block << behind >> behind; /* a branch for long words would be guessed wrong */
}

static int may_hold(const uint64_t *bits, int64_t shift, uint64_t hash) {
    const uint64_t some = bits[hash >> shift];
    return (int)(some >> (hash >> 32 & 63) & some >> (hash >> 38 & 63) & 1);
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

static uint64_t pair_key(const Words *words, int64_t word) {
    return key_of(block_of(words, word), ~block_of(words, word + 1));
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

/* The words of a stretch that may begin a seed; how many. No branch to guess wrong: what is no seed is overwritten. Not
   inlined: the loop needs all registers. The last word of all has none behind it, and begins no seed. */
__attribute__((noinline)) static int64_t find_likely(const Words *words, int64_t first, int64_t stop,
                                                     const Seeds *seeds, int64_t *letters_before, Likely *found) {
    const uint64_t *bits = seeds->pair_bits;
    const int64_t shift = seeds->pair_shift;
    int64_t count = 0, before = *letters_before;
    uint64_t block = block_of(words, first);
    for (int64_t word = first; word < stop; word++) {
        const uint64_t next = block_of(words, word + 1);
        found[count] = (Likely){word, before};
        count += may_hold(bits, shift, block * ORDER_FACTOR + next * WORD_FACTOR);
        before += words->edges[2 * word + 1] - words->edges[2 * word];
        block = next;
    }
    *letters_before = before;
    return count;
}

/* The letters around one word beside those around each seed of a key, within one text; how many places were found. */
static int64_t compare(const Words *words, Likely at, uint64_t key, const int64_t text[2], const Seeds *seeds,
                       const Passages *passages, Region *regions, int64_t *found, int64_t count, int64_t capacity) {
    const int64_t before = count, place = words->edges[2 * at.word];
    for (int64_t seed = first_seed(seeds->keys, seeds->count, key); seed < seeds->count; seed++) {
        if (seeds->keys[seed] != key) break;
        const int64_t passage = seeds->passages[seed], letter = seeds->letters[seed];
        const int64_t beside = at.letters_before - letter;
        Region *region = regions + (uint64_t)(passage * 31 + beside) % REMEMBERED;
        if (region->passage == passage && region->beside == beside && place < region->stop) continue;
        const uint8_t *letters = passages->letters + letter;
        const int64_t *bounds = passages->bounds + passage;
        int64_t stop;
        const int64_t right = equal_right(words->folded, place, text[1], letters, bounds[1] - letter, &stop);
        const int64_t left = equal_left(words->folded, place, text[0], letters, letter - bounds[0]);
        *region = (Region){passage, beside, stop};
        if (left + right < passages->shortest[passage]) continue;
        if (count < capacity) {
            const int64_t numbers[4] = {at.word, seed, left, right};
            memcpy(found + 4 * count, numbers, sizeof numbers);
        }
        count++;
    }
    return count - before;
}

/* Four numbers for each place where at least the letters of a passage's shortest n-gram are equal: the word of the
   document and the seed that led there, and how many letters are equal before and from there on. How many there are; no
   more than `capacity` are written. `kinds`: 2 where some seeds go by their two words instead of sixteen letters;
   `memory`: room for `REMEMBERED` regions. */
int64_t milldam_regions(const uint8_t *folded, const uint32_t *edges, int64_t words, const int64_t *offsets,
                        const uint64_t *pair_bits, int64_t pair_shift, const uint64_t *key_bits, int64_t key_shift,
                        int64_t kinds, const uint64_t *seed_keys, const int64_t *seed_letters,
                        const int64_t *seed_passages, int64_t seed_count, const uint8_t *letters, const int64_t *bounds,
                        const int64_t *shortest, int64_t *memory, int64_t *found, int64_t capacity) {
    const Words here = {folded, edges, words};
    const Seeds seeds = {pair_bits, key_bits, seed_keys, pair_shift, key_shift, seed_letters, seed_passages, seed_count};
    const Passages passages = {letters, bounds, shortest};
    Region *regions = (Region *)memory;
    Likely likely[AT_ONCE + 1];
    int64_t count = 0, text = 0, letters_before = 0;
    memset(regions, 0, REMEMBERED * sizeof *regions);
    for (int64_t first = 0; first < words - 1; first += AT_ONCE) {
        const int64_t stop = first + AT_ONCE < words - 1 ? first + AT_ONCE : words - 1;
        const int64_t some = find_likely(&here, first, stop, &seeds, &letters_before, likely);
        for (const Likely *at = likely; at < likely + some; at++) {
            for (int64_t kind = 0; kind < kinds; kind++) {
                const uint64_t key = kind ? pair_key(&here, at->word) : letters_key(&here, at->word);
                if (!may_hold(key_bits, key_shift, key)) continue;
                while (offsets[text + 1] - offsets[0] <= edges[2 * at->word]) text++;
                const int64_t within[2] = {offsets[text] - offsets[0], offsets[text + 1] - offsets[0]};
                count += compare(&here, *at, key, within, &seeds, &passages, regions, found, count, capacity);
            }
        }
    }
    return count;
}
