/* Texts -> their letters and words, and where they are equal to passages of evaluation sets. The twins, and the rules,
   are in decontamination/letters.py and decontamination/scanning.py. */

#include <stdint.h>
#include <string.h>

enum { SEED_LETTERS = 16, REMEMBERED = 4096 };
static const uint64_t WORD_FACTOR = UINT64_C(0x9FB21C651E98DF25), ORDER_FACTOR = UINT64_C(0xD6E8FEB86659FD93);
static const uint64_t BASE = UINT64_C(0x9E3779B97F4A7C15), INVERSE = UINT64_C(0xF1DE83E19937733D);
static const uint64_t TOPS = UINT64_C(0x8080808080808080);

static uint64_t eight_at(const uint8_t *bytes) {
    uint64_t eight;
    memcpy(&eight, bytes, 8);
    return eight;
}

/* ---- letters ---- */

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
        const uint64_t beyond = eight_at(folded + at) & TOPS; /* behind the texts are zeros */
        at += beyond ? __builtin_ctzll(beyond) >> 3 : 8;
    }
}

typedef struct {
    const uint8_t *raw;
    int64_t size;
    const int64_t *offsets; /* of the texts, and the end */
    int64_t texts;
    const uint16_t *folds;
    const uint8_t *alone;
} Texts;

/* `folded`: room for 192 bytes more, which become zeros; `borders`: for `size` bits and 192 more. */
static void fold(const Texts *texts, uint8_t *folded, uint64_t *borders) {
    memset(borders, 0, (size_t)(texts->size / 64 + 3) * 8);
    memset(folded + texts->size, 0, 192);
    fold_ascii(texts->raw, texts->size, folded);
    for (int64_t text = 0; text <= texts->texts; text++) set_bit(borders, texts->offsets[text] - texts->offsets[0]);
    fold_beyond(folded, texts->size, texts->folds, texts->alone, borders);
}

/* ---- words, 64 bytes at a time ---- */

/* The first bits of eight bytes, side by side. */
static uint64_t gathered(uint64_t tops) { return (tops >> 7) * UINT64_C(0x0102040810204080) >> 56; }

typedef struct {
    uint64_t letters, starts; /* bytes of words; where words begin */
} Block;

typedef struct {
    uint64_t inside; /* whether the block before ends in a word */
    int64_t start;   /* where it begins */
} Open;

/* A word of more than 64 bytes is cut after each 64. */
static Block block_at(const uint8_t *folded, int64_t base, uint64_t borders, Open *open) {
    Block found = {0, 0};
    for (int k = 0; k < 8; k++) {
        const uint64_t eight = eight_at(folded + base + 8 * k);
        found.letters |= gathered((((eight & ~TOPS) + ~TOPS) | eight) & TOPS) << 8 * k;
    }
    if (open->inside) { /* 64 bytes on is the bit of the same number */
        const uint64_t ends = ~found.letters | borders;
        const int64_t bit = open->start & 63;
        if (!(ends & ((UINT64_C(2) << bit) - 1))) borders |= UINT64_C(1) << bit;
    }
    found.starts = found.letters & (~(found.letters << 1 | open->inside) | borders);
    open->inside = found.letters >> 63;
    if (found.starts) open->start = base + 63 - __builtin_clzll(found.starts);
    return found;
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
int64_t milldam_words(const uint8_t *raw, int64_t size, const int64_t *offsets, int64_t texts, const uint16_t *folds,
                      const uint8_t *alone, uint8_t *folded, uint64_t *borders, uint32_t *starts, uint32_t *stops) {
    const Texts given = {raw, size, offsets, texts, folds, alone};
    Open open = {0, 0};
    int64_t begun = 0, ended = 0;
    fold(&given, folded, borders);
    for (int64_t base = 0; base <= size; base += 64) {
        const uint64_t inside = open.inside;
        const Block block = block_at(folded, base, borders[base >> 6], &open);
        begun = list_bits(block.starts, base, starts, begun);
        ended = list_bits((block.letters << 1 | inside) & (~block.letters | block.starts), base, stops, ended);
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
static int64_t list_words(const uint8_t *folded, int64_t size, const uint64_t *borders, uint32_t *places) {
    Open open = {0, 0};
    int64_t count = 0;
    for (int64_t base = 0; base < size; base += 64)
        count = list_bits(block_at(folded, base, borders[base >> 6], &open).starts, base, places, count);
    places[count] = (uint32_t)size;
    return count;
}

/* The first eight letters of a word; up to the next one are zeros. */
static uint64_t letters_of(const uint8_t *folded, const uint32_t *word) {
    const int32_t missing = 8 - (int32_t)(word[1] - word[0]), behind = 8 * (missing & ~(missing >> 31));
    return eight_at(folded + word[0]) << behind >> behind; /* a branch for long words would be guessed wrong */
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

/* A number for the sixteen letters from a place on, whatever lies between words. */
static uint64_t letters_key(const uint8_t *folded, int64_t size, int64_t place) {
    uint8_t letters[SEED_LETTERS + 1] = {0};
    for (int64_t filled = 0; place < size && filled < SEED_LETTERS; place++) {
        letters[filled] = folded[place];
        filled += folded[place] != 0;
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
    int64_t *numbers, count, capacity;
    int64_t base; /* where the texts lie that are looked at */
    Region *regions;
} Found;

/* The letters around a place beside those around each seed of a key. */
static void compare(Document *document, uint64_t key, const Seeds *seeds, const Passages *passages, Found *found) {
    for (int64_t seed = first_seed(seeds->keys, seeds->count, key); seed < seeds->count; seed++) {
        if (seeds->keys[seed] != key) break;
        const int64_t passage = seeds->passages[seed], letter = seeds->letters[seed];
        const uint8_t *letters = passages->letters + letter;
        const int64_t *bounds = passages->bounds + passage;
        Region *region = NULL;
        int64_t stop, beside = 0;
        if (document->remembered) {
            beside = letters_before(document) - letter;
            region = found->regions + (uint64_t)(passage * 31 + beside) % REMEMBERED;
            if (region->passage == passage && region->beside == beside && document->place < region->stop) continue;
        }
        const int64_t right = equal_right(document, letters, bounds[1] - letter, &stop);
        const int64_t left = equal_left(document, letters, letter - bounds[0]);
        if (left + right < passages->shortest[passage]) continue;
        if (!document->remembered) {
            document->remembered = 1;
            memset(found->regions, 0, REMEMBERED * sizeof *region);
            beside = letters_before(document) - letter;
            region = found->regions + (uint64_t)(passage * 31 + beside) % REMEMBERED;
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
    uint64_t *borders;
    uint32_t *places, *likely; /* of words; of those that may begin a seed, which */
} Room;

static void scan(const Texts *texts, const Room *room, int64_t kinds, const Seeds *seeds, const Passages *passages,
                 Found *found) {
    const uint8_t *folded = room->folded;
    const int64_t size = texts->size, *offsets = texts->offsets;
    fold(texts, room->folded, room->borders);
    const int64_t words = list_words(folded, size, room->borders, room->places);
    const int64_t likely = list_likely(folded, room->places, words, seeds, room->likely);
    Document document = {folded, 0, 0, 0, 0, 0, 0};
    for (int64_t k = 0, text = -1; k < likely; k++) {
        const uint32_t *word = room->places + room->likely[k];
        for (int64_t kind = 0; kind < kinds; kind++) {
            const uint64_t key = kind ? key_of(letters_of(folded, word), ~letters_of(folded, word + 1))
                                      : letters_key(folded, size, *word);
            if (!may_hold(seeds->key_bits, seeds->key_shift, key)) continue;
            while (document.high <= *word) {
                text++;
                const int64_t low = offsets[text] - offsets[0];
                document = (Document){folded, low, offsets[text + 1] - offsets[0], low, low, 0, 0};
            }
            document.place = *word;
            compare(&document, key, seeds, passages, found);
        }
    }
}

/* Four numbers for each place where at least the letters of a passage's shortest n-gram are equal: the place, the seed
   that led there, and how many letters are equal before and from there on. How many there are; no more than `capacity`
   are written.

   So much text at a time as the processor's cache holds: `at_once` bytes, or one text that is larger. `folded`,
   `borders`, `places` and `likely` have room for that, as `words` needs it. `memory`: for `REMEMBERED` regions.
   `kinds`: 2 where some seeds go by their two words instead of sixteen letters. */
int64_t milldam_regions(const uint8_t *raw, int64_t at_once, const int64_t *offsets, int64_t texts,
                        const uint16_t *folds, const uint8_t *alone, uint8_t *folded, uint64_t *borders,
                        uint32_t *places, uint32_t *likely, int64_t *memory, int64_t kinds, const uint64_t *pair_bits,
                        int64_t pair_shift, const uint64_t *key_bits, int64_t key_shift, const uint64_t *seed_keys,
                        const int64_t *seed_letters, const int64_t *seed_passages, int64_t seed_count,
                        const uint8_t *letters, const int64_t *bounds, const int64_t *shortest, int64_t *numbers,
                        int64_t capacity) {
    const Seeds seeds = {pair_bits,    pair_shift,    key_bits,  key_shift, seed_keys,
                         seed_letters, seed_passages, seed_count};
    const Passages passages = {letters, bounds, shortest};
    const Room room = {folded, borders, places, likely};
    Found found = {numbers, 0, capacity, 0, (Region *)memory};
    for (int64_t first = 0, stop; first < texts; first = stop) {
        for (stop = first + 1; stop < texts && offsets[stop + 1] - offsets[first] <= at_once;) stop++;
        found.base = offsets[first] - offsets[0];
        const int64_t size = offsets[stop] - offsets[first];
        const Texts some = {raw + found.base, size, offsets + first, stop - first, folds, alone};
        scan(&some, &room, kinds, &seeds, &passages, &found);
    }
    return found.count;
}
