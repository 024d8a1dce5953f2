/* Texts -> their letters and words, and where they are equal to passages of evaluation sets. The twins, and the rules,
   are in decontamination/letters.py and decontamination/scanning.py. */

#include "arrays.h"

#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { SEED_LETTERS = 16, REMEMBERED_BITS = 12, REMEMBERED = 1 << REMEMBERED_BITS };
static const uint64_t WORD_FACTOR = UINT64_C(0x9FB21C651E98DF25), ORDER_FACTOR = UINT64_C(0xD6E8FEB86659FD93);
static const uint64_t BASE = UINT64_C(0x9E3779B97F4A7C15), INVERSE = UINT64_C(0xF1DE83E19937733D);

static const uint64_t FIRST[9] = {0, /* so many of eight bytes */
                                  UINT64_C(0xFF),
                                  UINT64_C(0xFFFF),
                                  UINT64_C(0xFFFFFF),
                                  UINT64_C(0xFFFFFFFF),
                                  UINT64_C(0xFFFFFFFFFF),
                                  UINT64_C(0xFFFFFFFFFFFF),
                                  UINT64_C(0xFFFFFFFFFFFFFF),
                                  UINT64_C(0xFFFFFFFFFFFFFFFF)};

static uint64_t eight_at(const uint8_t *bytes) {
    uint64_t eight;
    memcpy(&eight, bytes, 8);
    return eight;
}

/* ---- letters, 64 bytes at a time ---- */

typedef struct {
    uint64_t letters, beyond, borders; /* bytes of words; bytes beyond ASCII; where words may not go on */
} Block;

/* ASCII letters in lower case and digits, 0 for all else that is ASCII, what is beyond as it is. */
#ifdef __SSE2__
static Block fold_ascii(const uint8_t *raw, uint8_t *folded) {
    const __m128i last_letter = _mm_set1_epi8(25), last_digit = _mm_set1_epi8(9);
    Block found = {0, 0, 0};
    for (int k = 0; k < 4; k++) {
        const __m128i some = _mm_loadu_si128((const __m128i *)raw + k), low = _mm_or_si128(some, _mm_set1_epi8(0x20));
        const __m128i from_a = _mm_sub_epi8(low, _mm_set1_epi8('a')), from_0 = _mm_sub_epi8(some, _mm_set1_epi8('0'));
        const __m128i letter = _mm_cmpeq_epi8(_mm_min_epu8(from_a, last_letter), from_a);
        const __m128i digit = _mm_cmpeq_epi8(_mm_min_epu8(from_0, last_digit), from_0);
        const __m128i kept = _mm_or_si128(digit, _mm_cmplt_epi8(some, _mm_setzero_si128()));
        _mm_storeu_si128((__m128i *)folded + k, _mm_or_si128(_mm_and_si128(low, letter), _mm_and_si128(some, kept)));
        found.letters |= (uint64_t)_mm_movemask_epi8(_mm_or_si128(letter, kept)) << 16 * k;
        found.beyond |= (uint64_t)_mm_movemask_epi8(some) << 16 * k;
    }
    return found;
}
#else
/* The first bits of eight bytes, side by side. */
static uint64_t gathered(uint64_t tops) { return (tops >> 7) * UINT64_C(0x0102040810204080) >> 56; }

static Block fold_ascii(const uint8_t *raw, uint8_t *folded) {
    const uint64_t tops = UINT64_C(0x8080808080808080);
    Block found = {0, 0, 0};
    for (int at = 0; at < 64; at++) {
        const uint8_t byte = raw[at], low = byte | 0x20;
        const uint8_t letter = (uint8_t)(low - 'a') < 26 ? low : 0;
        folded[at] = byte >= 0x80 || (uint8_t)(byte - '0') < 10 ? byte : letter;
    }
    for (int k = 0; k < 8; k++) {
        const uint64_t eight = eight_at(folded + 8 * k);
        found.letters |= gathered((((eight & ~tops) + ~tops) | eight) & tops) << 8 * k;
        found.beyond |= gathered(eight & tops) << 8 * k;
    }
    return found;
}
#endif

static void set_border(Block *blocks, int64_t at) { blocks[at >> 6].borders |= UINT64_C(1) << (at & 63); }

/* One character beyond ASCII: its letter, or zeros; its size. A character that is a word of its own has borders. */
static int64_t fold_character(uint8_t *at, int64_t place, int64_t left, const uint16_t *folds, const uint8_t *alone,
                              Block *blocks) {
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
            for (int64_t k = place; k < place + size; k++) blocks[k >> 6].letters &= ~(UINT64_C(1) << (k & 63));
        } else if (letter != code) {
            at[0] = (uint8_t)(size == 2 ? 0xC0 | letter >> 6 : 0xE0 | letter >> 12);
            at[1] = (uint8_t)(0x80 | (size == 2 ? letter & 0x3F : letter >> 6 & 0x3F));
            if (size == 3) at[2] = (uint8_t)(0x80 | (letter & 0x3F));
        }
    }
    if (own) {
        set_border(blocks, place);
        set_border(blocks, place + size);
    }
    return size;
}

enum { CHARACTERS = 1 << 16, PADDING = 192 };

/* Whether texts lie within some bytes, and the room for so many of them at once is large enough. */
static int texts_fit(int64_t raw, const int64_t *offsets, int64_t offsets_count, int64_t folds, int64_t alone,
                     int64_t at_once, int64_t folded, int64_t blocks, int64_t starts, int64_t stops) {
    if (!lie_within(offsets, offsets_count, INT64_MAX) || offsets[offsets_count - 1] - offsets[0] > raw) return 0;
    for (int64_t k = 1; k < offsets_count; k++)
        if (offsets[k] - offsets[k - 1] > at_once) at_once = offsets[k] - offsets[k - 1];
    return at_once < UINT32_MAX - PADDING && folds == CHARACTERS && alone == CHARACTERS &&
           folded >= at_once + PADDING && blocks >= 3 * (at_once / 64 + 3) && starts >= at_once + 8 &&
           stops >= at_once + 8;
}

typedef struct {
    const uint8_t *raw;
    int64_t size;
    const int64_t *offsets; /* of the texts, and the end */
    int64_t texts;
    const uint16_t *folds;
    const uint8_t *alone;
} Texts;

/* `folded`: room for 192 bytes more, which become zeros; `blocks`: for three more. */
static void fold(const Texts *texts, uint8_t *folded, Block *blocks) {
    const int64_t size = texts->size, whole = size & ~INT64_C(63);
    uint8_t last[64] = {0};
    memcpy(last, texts->raw + whole, (size_t)(size - whole));
    for (int64_t base = 0; base < whole; base += 64) blocks[base >> 6] = fold_ascii(texts->raw + base, folded + base);
    blocks[whole >> 6] = fold_ascii(last, folded + whole);
    memset(folded + size, 0, 192);
    memset(blocks + (whole >> 6) + 1, 0, 2 * sizeof *blocks);
    for (int64_t text = 0; text <= texts->texts; text++) set_border(blocks, texts->offsets[text] - texts->offsets[0]);
    for (int64_t base = 0, behind = 0; base < size; base += 64) {
        uint64_t beyond = blocks[base >> 6].beyond;
        while (beyond) {
            const int64_t at = base + __builtin_ctzll(beyond);
            if (at >= behind) behind = at + fold_character(folded + at, at, size - at, texts->folds, texts->alone, blocks);
            beyond &= beyond - 1;
        }
    }
}

/* ---- words ---- */

typedef struct {
    uint64_t inside; /* whether the block before ends in a word */
    int64_t start;   /* where it begins */
} Open;

/* Where words begin. A word of more than 64 bytes is cut behind the character that has the 64th. */
static uint64_t starts_in(const Block *block, const uint8_t *folded, int64_t base, Open *open) {
    uint64_t borders = block->borders;
    if (open->inside) {
        const uint64_t ends = ~block->letters | borders;
        int64_t bit = open->start + 64 - base;
        if (bit < 0) bit = 0; /* within a character that began in the block before */
        while (bit < 64 && (folded[base + bit] & 0xC0) == 0x80) bit++;
        if (bit < 64 && !(ends & ((UINT64_C(2) << bit) - 1))) borders |= UINT64_C(1) << bit;
    }
    const uint64_t starts = block->letters & (~(block->letters << 1 | open->inside) | borders);
    open->inside = block->letters >> 63;
    if (starts) open->start = base + 63 - __builtin_clzll(starts);
    return starts;
}

static int64_t count_bits(uint64_t bits) {
    bits -= bits >> 1 & UINT64_C(0x5555555555555555);
    bits = (bits & UINT64_C(0x3333333333333333)) + (bits >> 2 & UINT64_C(0x3333333333333333));
    return (int64_t)(((bits + (bits >> 4)) & UINT64_C(0x0F0F0F0F0F0F0F0F)) * UINT64_C(0x0101010101010101) >> 56);
}

/* Where bits are, from `count` on; how many there are then. Eight are written at a time, as the end of a short loop is
   guessed wrong: up to seven behind the last mean nothing. */
static int64_t list_bits(uint64_t bits, int64_t base, uint32_t *places, int64_t count) {
    const int64_t stop = count + count_bits(bits);
    for (; count < stop; count += 8) {
        for (int k = 0; k < 8; k++) {
            places[count + k] = (uint32_t)(base + __builtin_ctzll(bits | UINT64_C(1) << 63));
            bits &= bits - 1;
        }
    }
    return stop;
}

/* Where words begin and where they end. `starts`, `stops`: room for `size` + 8 each. How many words. */
int64_t milldam_words(const uint8_t *raw, int64_t size, const int64_t *offsets, int64_t offsets_count,
                      const uint16_t *folds, int64_t folds_count, const uint8_t *alone, int64_t alone_count,
                      uint8_t *folded, int64_t folded_count, uint64_t *blocks, int64_t blocks_count, uint32_t *starts,
                      int64_t starts_count, uint32_t *stops, int64_t stops_count) {
    NEEDS(texts_fit(size, offsets, offsets_count, folds_count, alone_count, size, folded_count, blocks_count,
                    starts_count, stops_count));
    NEEDS(offsets[offsets_count - 1] - offsets[0] == size);
    const Texts given = {raw, size, offsets, offsets_count - 1, folds, alone};
    Open open = {0, 0};
    int64_t begun = 0, ended = 0;
    fold(&given, folded, (Block *)blocks);
    for (int64_t base = 0; base <= size; base += 64) {
        const Block *block = (Block *)blocks + (base >> 6);
        const uint64_t inside = open.inside, first = starts_in(block, folded, base, &open);
        begun = list_bits(first, base, starts, begun);
        ended = list_bits((block->letters << 1 | inside) & (~block->letters | first), base, stops, ended);
    }
    return begun;
}

/* ---- seeds ---- */

typedef struct {
    const uint64_t *pair_bits;
    int64_t pair_shift;
    const uint64_t *key_bits;
    int64_t key_shift;
    const uint64_t *keys;
    const int64_t *letters, *passages;
    int64_t count;
} Seeds;

static int may_hold(const uint64_t *bits, int64_t shift, uint64_t hash) {
    const uint64_t some = bits[hash >> shift];
    return (int)(some >> (hash >> 32 & 63) & some >> (hash >> 38 & 63) & 1);
}

/* Where words begin, and the end of the texts; how many words. */
static int64_t list_words(const Block *blocks, const uint8_t *folded, int64_t size, uint32_t *places) {
    Open open = {0, 0};
    int64_t count = 0;
    for (int64_t base = 0; base < size; base += 64)
        count = list_bits(starts_in(blocks + (base >> 6), folded, base, &open), base, places, count);
    places[count] = (uint32_t)size;
    return count;
}

/* The first eight letters of a word; up to the next one are zeros. */
static uint64_t letters_of(const uint8_t *folded, const uint32_t *word) {
    const uint32_t size = word[1] - word[0];
    return eight_at(folded + word[0]) & FIRST[size < 8 ? size : 8];
}

/* The words that, with the next one, may be a seed; how many. No branch to guess wrong: what is none is overwritten. */
__attribute__((noinline)) static int64_t list_likely(const uint8_t *folded, const uint32_t *places, int64_t words,
                                                     const Seeds *seeds, uint32_t *likely) {
    const uint64_t *bits = seeds->pair_bits;
    const int64_t shift = seeds->pair_shift;
    int64_t count = 0;
    uint64_t letters = words ? letters_of(folded, places) : 0;
    for (int64_t word = 0; word < words - 1; word++) {
        const uint64_t next = letters_of(folded, places + word + 1);
        likely[count] = (uint32_t)word;
        count += may_hold(bits, shift, letters * ORDER_FACTOR + next * WORD_FACTOR);
        letters = next;
    }
    return count;
}

static uint64_t key_of(uint64_t low, uint64_t high) {
    uint64_t key = low * BASE;
    key = ((key ^ key >> 29) + high) * INVERSE;
    return key ^ key >> 32;
}

/* A number for the sixteen letters from a word on, whatever lies between words. */
static uint64_t letters_key(const uint8_t *folded, const uint32_t *word, const uint32_t *end) {
    uint8_t letters[SEED_LETTERS + 8] = {0};
    uint32_t place = word[0];
    for (int64_t filled = 0; word < end && filled < SEED_LETTERS;) {
        const uint32_t left = word[1] - place;
        const uint64_t some = eight_at(folded + place) & FIRST[left < 8 ? left : 8];
        memcpy(letters + filled, &some, 8);
        filled += some ? 8 - (__builtin_clzll(some) >> 3) : 0;
        word += left <= 8;
        place = left <= 8 ? word[0] : place + 8;
    }
    return key_of(eight_at(letters), eight_at(letters + 8));
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

/* ---- what is equal ---- */

typedef struct {
    const uint8_t *letters;
    const int64_t *bounds, *shortest;
    int64_t size, count; /* letters, passages */
} Passages;

typedef struct { /* what is equal, so that a seed inside of it is not looked at again */
    int64_t passage, beside, stop;
} Region;

typedef struct {
    const uint8_t *folded;
    int64_t low, high, place;     /* of the text that is looked at; where */
    int64_t counted_to, letters;  /* how many letters lie before a place of it */
    int remembered;               /* whether there are regions in it */
} Document;

/* How many letters from a place on are those from a letter of a passage on; and where the last of them ends. */
static int64_t equal_right(const Document *document, const uint8_t *letters, int64_t left, int64_t *stop) {
    int64_t equal = 0, place = document->place;
    for (*stop = place; place < document->high; place++) {
        if (!document->folded[place]) continue;
        if (equal == left || document->folded[place] != letters[equal]) break;
        equal++;
        *stop = place + 1;
    }
    return equal;
}

static int64_t equal_left(const Document *document, const uint8_t *letters, int64_t left) {
    int64_t equal = 0, place = document->place;
    while (place-- > document->low) {
        if (!document->folded[place]) continue;
        if (equal == left || document->folded[place] != letters[-1 - equal]) break;
        equal++;
    }
    return equal;
}

/* How many letters lie before the place that is looked at. */
static int64_t letters_before(Document *document) {
    for (; document->counted_to < document->place; document->counted_to++)
        document->letters += document->folded[document->counted_to] != 0;
    return document->letters;
}

typedef struct {
    int64_t *numbers, count, capacity; /* a count of REFUSED: the index is none */
    int64_t base; /* where the texts lie that are looked at */
    Region *regions;
} Found;

/* Where a region is remembered. The highest bits: stretches beside each other are often a power of two apart. */
static uint64_t slot_of(int64_t passage, int64_t beside) {
    return ((uint64_t)passage * INVERSE + (uint64_t)beside) * BASE >> (64 - REMEMBERED_BITS);
}

/* The letters around a place beside those around each seed of a key. */
static void compare(Document *document, uint64_t key, const Seeds *seeds, const Passages *passages, Found *found) {
    for (int64_t seed = first_seed(seeds->keys, seeds->count, key); seed < seeds->count; seed++) {
        if (seeds->keys[seed] != key) break;
        const int64_t passage = seeds->passages[seed], letter = seeds->letters[seed];
        const uint8_t *letters = passages->letters + letter;
        const int64_t *bounds = passages->bounds + passage;
        if (passage < 0 || passage >= passages->count || bounds[0] < 0 || letter < bounds[0] || letter > bounds[1] ||
            bounds[1] > passages->size) {
            found->count = REFUSED;
            return;
        }
        Region *region = NULL;
        int64_t stop, beside = 0;
        if (document->remembered) {
            beside = letters_before(document) - letter;
            region = found->regions + slot_of(passage, beside);
            if (region->passage == passage && region->beside == beside && document->place < region->stop) continue;
        }
        const int64_t right = equal_right(document, letters, bounds[1] - letter, &stop);
        const int64_t left = equal_left(document, letters, letter - bounds[0]);
        if (left + right < passages->shortest[passage]) continue;
        if (!document->remembered) {
            document->remembered = 1;
            memset(found->regions, 0, REMEMBERED * sizeof *region);
            beside = letters_before(document) - letter;
            region = found->regions + slot_of(passage, beside);
        }
        *region = (Region){passage, beside, stop};
        if (found->count < found->capacity) {
            const int64_t numbers[4] = {found->base + document->place, seed, left, right};
            memcpy(found->numbers + 4 * found->count, numbers, sizeof numbers);
        }
        found->count++;
    }
}

typedef struct {
    uint8_t *folded;
    Block *blocks;
    uint32_t *places, *likely; /* of words; of those that may begin a seed, which */
} Room;

static void scan(const Texts *texts, const Room *room, int64_t kinds, const Seeds *seeds, const Passages *passages,
                 Found *found) {
    const uint8_t *folded = room->folded;
    const int64_t size = texts->size, *offsets = texts->offsets;
    fold(texts, room->folded, room->blocks);
    const int64_t words = list_words(room->blocks, folded, size, room->places);
    const int64_t likely = list_likely(folded, room->places, words, seeds, room->likely);
    Document document = {folded, 0, 0, 0, 0, 0, 0};
    for (int64_t k = 0, text = -1; k < likely; k++) {
        const uint32_t *word = room->places + room->likely[k];
        for (int64_t kind = 0; kind < kinds; kind++) {
            const uint64_t key = kind ? key_of(letters_of(folded, word), ~letters_of(folded, word + 1))
                                      : letters_key(folded, word, room->places + words);
            if (!may_hold(seeds->key_bits, seeds->key_shift, key)) continue;
            while (document.high <= *word) {
                text++;
                const int64_t low = offsets[text] - offsets[0];
                document = (Document){folded, low, offsets[text + 1] - offsets[0], low, low, 0, 0};
            }
            document.place = *word;
            compare(&document, key, seeds, passages, found);
            if (found->count < 0) return;
        }
    }
}

/* Four numbers for each place where at least the letters of a passage's shortest n-gram are equal: the place, the seed
   that led there, and how many letters are equal before and from there on. How many there are; no more than `capacity`
   are written.

   So much text at a time as the processor's cache holds: `at_once` bytes, or one text that is larger. `folded`,
   `blocks`, `places` and `likely` have room for that, as `words` needs it. `memory`: for `REMEMBERED` regions.
   `kinds`: 2 where some seeds go by their two words instead of sixteen letters. */
int64_t milldam_regions(const uint8_t *raw, int64_t raw_count, const int64_t *offsets, int64_t offsets_count,
                        const uint16_t *folds, int64_t folds_count, const uint8_t *alone, int64_t alone_count,
                        uint8_t *folded, int64_t folded_count, uint64_t *blocks, int64_t blocks_count,
                        uint32_t *places, int64_t places_count, uint32_t *likely, int64_t likely_count,
                        int64_t at_once, int64_t *memory, int64_t memory_count, int64_t kinds,
                        const uint64_t *pair_bits, int64_t pair_bits_count, int64_t pair_shift,
                        const uint64_t *key_bits, int64_t key_bits_count, int64_t key_shift, const uint64_t *seed_keys,
                        int64_t seed_count, const int64_t *seed_letters, int64_t seed_letters_count,
                        const int64_t *seed_passages, int64_t seed_passages_count, const uint8_t *letters,
                        int64_t letters_count, const int64_t *bounds, int64_t bounds_count, const int64_t *shortest,
                        int64_t shortest_count, int64_t *numbers, int64_t numbers_count) {
    const int64_t texts = offsets_count - 1, capacity = numbers_count / 4;
    NEEDS(texts_fit(raw_count, offsets, offsets_count, folds_count, alone_count, at_once, folded_count, blocks_count,
                    places_count, likely_count));
    NEEDS(memory_count >= REMEMBERED * (int64_t)(sizeof(Region) / sizeof *memory) && bounds_count == shortest_count + 1);
    NEEDS(seed_letters_count == seed_count && seed_passages_count == seed_count);
    NEEDS(pair_shift > 0 && pair_shift < 64 && (uint64_t)pair_bits_count > UINT64_MAX >> pair_shift);
    NEEDS(key_shift > 0 && key_shift < 64 && (uint64_t)key_bits_count > UINT64_MAX >> key_shift);
    const Seeds seeds = {pair_bits,    pair_shift,    key_bits,  key_shift, seed_keys,
                         seed_letters, seed_passages, seed_count};
    const Passages passages = {letters, bounds, shortest, letters_count, shortest_count};
    const Room room = {folded, (Block *)blocks, places, likely};
    Found found = {numbers, 0, capacity, 0, (Region *)memory};
    for (int64_t first = 0, stop; first < texts; first = stop) {
        for (stop = first + 1; stop < texts && offsets[stop + 1] - offsets[first] <= at_once;) stop++;
        found.base = offsets[first] - offsets[0];
        const int64_t size = offsets[stop] - offsets[first];
        const Texts some = {raw + found.base, size, offsets + first, stop - first, folds, alone};
        scan(&some, &room, kinds, &seeds, &passages, &found);
        if (found.count < 0) break;
    }
    return found.count;
}
