/* Texts -> their letters and words, and where they are equal to passages of evaluation sets. The rules are in
   decontamination/letters.py and decontamination/matches.py. */

#include "arrays.h"

#include <string.h>

enum { CHARACTERS = 1 << 16, PADDING = 192, SEED_LETTERS = 16 };
static const uint64_t BASE = UINT64_C(0x9E3779B97F4A7C15), INVERSE = UINT64_C(0xF1DE83E19937733D);

static uint64_t eight_at(const uint8_t *bytes) {
    uint64_t eight;
    memcpy(&eight, bytes, 8);
    return eight;
}

/* ---- letters, 64 bytes at a time ---- */

typedef struct {
    uint64_t letters, beyond, borders; /* bytes of words; bytes beyond ASCII; where words may not go on */
} Block;

/* The first bits of eight bytes, side by side. */
static uint64_t gathered(uint64_t tops) { return (tops >> 7) * UINT64_C(0x0102040810204080) >> 56; }

/* ASCII letters in lower case and digits, 0 for all else that is ASCII, what is beyond as it is. */
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

typedef struct {
    uint8_t *folded;
    Block *blocks;
    uint32_t *starts, *stops;
} Room;

/* Whether texts lie within some bytes, and there is room for all of them, or for the largest and some more. */
static int texts_fit(int64_t raw, const int64_t *offsets, int64_t offsets_count, int64_t folds, int64_t alone,
                     int64_t at_once, int64_t folded, int64_t blocks, int64_t starts, int64_t stops) {
    if (!lie_within(offsets, offsets_count, INT64_MAX) || offsets[offsets_count - 1] - offsets[0] > raw) return 0;
    for (int64_t k = 1; k < offsets_count; k++)
        if (offsets[k] - offsets[k - 1] > at_once) at_once = offsets[k] - offsets[k - 1];
    return at_once < UINT32_MAX - PADDING && folds == CHARACTERS && alone == CHARACTERS &&
           folded >= at_once + PADDING && blocks >= 3 * (at_once / 64 + 3) && starts >= at_once + 8 &&
           stops >= at_once + 8;
}

static int64_t list_words(const Texts *texts, const Room *room) {
    Open open = {0, 0};
    int64_t begun = 0, ended = 0;
    fold(texts, room->folded, room->blocks);
    for (int64_t base = 0; base <= texts->size; base += 64) {
        const Block *block = room->blocks + (base >> 6);
        const uint64_t inside = open.inside, first = starts_in(block, room->folded, base, &open);
        begun = list_bits(first, base, room->starts, begun);
        ended = list_bits((block->letters << 1 | inside) & (~block->letters | first), base, room->stops, ended);
    }
    return begun;
}

/* Where words begin and where they end; how many words. */
int64_t milldam_words(const uint8_t *raw, int64_t size, const int64_t *offsets, int64_t offsets_count,
                      const uint16_t *folds, int64_t folds_count, const uint8_t *alone, int64_t alone_count,
                      uint8_t *folded, int64_t folded_count, uint64_t *blocks, int64_t blocks_count, uint32_t *starts,
                      int64_t starts_count, uint32_t *stops, int64_t stops_count) {
    NEEDS(texts_fit(size, offsets, offsets_count, folds_count, alone_count, size, folded_count, blocks_count,
                    starts_count, stops_count));
    NEEDS(offsets[offsets_count - 1] - offsets[0] == size);
    const Texts texts = {raw, size, offsets, offsets_count - 1, folds, alone};
    const Room room = {folded, (Block *)blocks, starts, stops};
    return list_words(&texts, &room);
}

/* ---- seeds ---- */

/* The letters of words, end to end, and how many lie before each word and before the end. `letters` has room for 16
   more. */
static int64_t gather_letters(const Room *room, int64_t words, uint8_t *letters, uint32_t *before) {
    int64_t count = 0;
    for (int64_t word = 0; word < words; word++) {
        const uint8_t *from = room->folded + room->starts[word];
        const int64_t size = room->stops[word] - room->starts[word];
        before[word] = (uint32_t)count;
        memcpy(letters + count, from, 16);
        for (int64_t at = 16; at < size; at += 16) memcpy(letters + count + at, from + at, 16);
        count += size;
    }
    before[words] = (uint32_t)count;
    memset(letters + count, 0, SEED_LETTERS);
    return count;
}

static uint64_t key_of(const uint8_t *letters) {
    uint64_t key = eight_at(letters) * BASE;
    key = ((key ^ key >> 29) + eight_at(letters + 8)) * INVERSE;
    return key ^ key >> 32;
}

static int may_hold(const uint64_t *bits, int64_t shift, uint64_t hash) {
    const uint64_t some = bits[hash >> shift];
    return (int)(some >> (hash >> 32 & 63) & some >> (hash >> 38 & 63) & 1);
}

/* The words from which on the letters may be those of a seed. No branch to guess wrong: what is none is overwritten. */
__attribute__((noinline)) static int64_t list_likely(const uint8_t *letters, const uint32_t *before, int64_t words,
                                                     const uint64_t *bits, int64_t shift, uint32_t *likely) {
    int64_t count = 0;
    for (int64_t word = 0; word < words; word++) {
        const uint64_t key = key_of(letters + before[word]);
        likely[count] = (uint32_t)word;
        count += may_hold(bits, shift, key) & may_hold(bits, shift, key * BASE);
    }
    return count;
}

/* The first of ascending numbers, from `low` on, that is not below a value. */
#define LOWER_BOUND(numbers, low, count, value)                                                                        \
    for (int64_t left = (count); left > 0;) {                                                                          \
        const int64_t half = left / 2;                                                                                 \
        if ((numbers)[(low) + half] < (value)) (low) += half + 1, left -= half + 1;                                    \
        else left = half;                                                                                              \
    }

static int64_t first_key(const uint64_t *keys, int64_t count, uint64_t key) {
    int64_t low = 0;
    LOWER_BOUND(keys, low, count, key)
    return low;
}

/* ---- what is equal ---- */

typedef struct { /* each array by the numbers of seeds, of passages, or of n-grams; all are ascending but `seed_...` */
    const uint64_t *keys;
    const int64_t *seed_letters, *seed_passages, *seed_grams, *seed_stops;
    const uint8_t *letters, *ignored;
    const uint32_t *edges; /* where words begin among the letters, and the end */
    const int64_t *word_bounds, *gram_bounds;
    int64_t seeds, letters_count, edges_count, passages, grams;
} Index;

enum { NUMBERS = 7 };

typedef struct { /* n-grams that were found: document, passage, letters beside, first, behind the last, from, to */
    int64_t *numbers, count, capacity, kept; /* kept: of documents that are closed */
    uint8_t *seen;
} Found;

typedef struct {
    const uint8_t *letters;
    const uint32_t *before;
    const Room *room;
    int64_t document, first_word, stop_word, place; /* its number, its words, and where its batch begins */
} Document;

/* The word of a document that begins at a letter; its end counts as one. Below zero: none does. */
static int64_t word_at(const Document *document, uint32_t letter) {
    int64_t low = document->first_word;
    LOWER_BOUND(document->before, low, document->stop_word - document->first_word, letter)
    return document->before[low] == letter ? low : -1;
}

static int64_t equal_right(const uint8_t *one, const uint8_t *other, int64_t most) {
    int64_t equal = 0;
    while (equal < most && one[equal] == other[equal]) equal++;
    return equal;
}

static int64_t equal_left(const uint8_t *one, const uint8_t *other, int64_t most) {
    int64_t equal = 0;
    while (equal < most && one[-1 - equal] == other[-1 - equal]) equal++;
    return equal;
}

/* Forgets what was found in the document that is open. */
static void close_document(Found *found) {
    for (; found->kept < found->count; found->kept++) {
        const int64_t *some = found->numbers + NUMBERS * found->kept;
        memset(found->seen + some[3], 0, (size_t)(some[4] - some[3]));
    }
}

/* Whether a seed lies where the index has room for it; a damaged file is no reason to read beyond it. */
static int seed_fits(const Index *index, int64_t seed) {
    const int64_t passage = index->seed_passages[seed], first = index->seed_grams[seed], stop = index->seed_stops[seed];
    if (passage < 0 || passage >= index->passages || first < 0 || first >= stop || stop > index->grams) return 0;
    const int64_t *words = index->word_bounds + passage, *grams = index->gram_bounds + passage;
    const int64_t letter = index->seed_letters[seed];
    return grams[0] <= first && stop <= grams[1] && words[0] >= 0 && words[1] < index->edges_count &&
           grams[1] - grams[0] <= words[1] - words[0] && letter >= index->edges[words[0]] &&
           letter <= index->edges[words[1]] && index->edges[words[1]] <= index->letters_count;
}

/* The n-grams that chose a seed, where they are new in the document: letter by letter, from the beginning of a word to the
   end of one. Gives REFUSED, or -1 where there is no more room, or 0. */
static int64_t compare(const Document *document, int64_t word, int64_t seed, const Index *index, Found *found) {
    if (!seed_fits(index, seed)) return REFUSED;
    const int64_t first = index->seed_grams[seed], stop = index->seed_stops[seed];
    int wanted = 0;
    for (int64_t gram = first; gram < stop; gram++) wanted |= !(found->seen[gram] | index->ignored[gram]);
    if (!wanted) return 0;
    const int64_t passage = index->seed_passages[seed], letter = index->seed_letters[seed];
    const int64_t *words = index->word_bounds + passage, *grams = index->gram_bounds + passage;
    const int64_t size = words[1] - words[0] - (grams[1] - grams[0]) + 1; /* words of an n-gram */
    const int64_t begins_at = words[0] - grams[0], ends = begins_at + size; /* its edges, from the number of an n-gram on */
    const uint32_t *edges = index->edges;
    const int64_t here = document->before[word], low = document->before[document->first_word];
    const int64_t beside = here - letter, high = document->before[document->stop_word];
    const int64_t after = edges[stop - 1 + ends] - letter, ahead = letter - edges[first + begins_at];
    if (after < 0 || ahead < 0 || letter + after > index->letters_count) return REFUSED;
    const uint8_t *one = document->letters + here, *other = index->letters + letter;
    const int64_t until = letter + equal_right(one, other, high - here < after ? high - here : after);
    const int64_t from = letter - equal_left(one, other, here - low < ahead ? here - low : ahead);
    int64_t *last = NULL;
    for (int64_t gram = first; gram < stop; gram++) {
        const int64_t begin = edges[gram + begins_at], end = edges[gram + ends];
        if (found->seen[gram] || begin < from || end > until) continue;
        const int64_t begins = word_at(document, (uint32_t)(begin + beside));
        const int64_t behind = word_at(document, (uint32_t)(end + beside));
        if (begins < 0 || behind <= begins) continue;
        if (!last || last[4] != gram) {
            if (found->count == found->capacity) {
                close_document(found);
                return -1;
            }
            last = found->numbers + NUMBERS * found->count++;
            last[0] = document->document, last[1] = passage, last[2] = beside, last[3] = gram;
            last[5] = document->place + document->room->starts[begins];
        }
        last[4] = gram + 1, last[6] = document->place + document->room->stops[behind - 1];
        found->seen[gram] = 1;
    }
    return 0;
}

/* The first of the words that begins at a place or behind it. */
static int64_t first_word(const uint32_t *starts, int64_t words, int64_t place) {
    int64_t low = 0;
    LOWER_BOUND(starts, low, words, place)
    return low;
}

/* Seven numbers for each run of n-grams of a passage that is found in a document for the first time: the document, the
   passage, how many letters lie between both, its first n-gram and the one behind its last, and the bytes from and to. How
   many there are; -1: more than there is room for.

   So much text at a time as the processor's cache holds: `at_once` bytes, or one text that is larger. `seen` has a zero
   for each n-gram, and again at the end, unless the last text is `open`: then it has what was found there. */
int64_t milldam_matches(
    const uint8_t *raw, int64_t raw_count, const int64_t *offsets, int64_t offsets_count, const uint16_t *folds,
    int64_t folds_count, const uint8_t *alone, int64_t alone_count, uint8_t *folded, int64_t folded_count,
    uint64_t *blocks, int64_t blocks_count, uint32_t *starts, int64_t starts_count, uint32_t *stops, int64_t stops_count,
    uint8_t *letters, int64_t letters_count, uint32_t *before, int64_t before_count, uint32_t *likely,
    int64_t likely_count, int64_t at_once, int64_t open, const uint64_t *bits, int64_t bits_count, int64_t shift,
    const uint64_t *keys, int64_t seeds, const int64_t *seed_letters, int64_t seed_letters_count,
    const int64_t *seed_passages, int64_t seed_passages_count, const int64_t *seed_grams, int64_t seed_grams_count,
    const int64_t *seed_stops, int64_t seed_stops_count, const uint8_t *passage_letters, int64_t passage_letters_count,
    const uint8_t *ignored, int64_t grams, const uint32_t *edges, int64_t edges_count, const int64_t *word_bounds,
    int64_t word_bounds_count, const int64_t *gram_bounds, int64_t gram_bounds_count, uint8_t *seen, int64_t seen_count,
    int64_t *numbers, int64_t numbers_count) {
    const int64_t texts = offsets_count - 1, room_for = starts_count < stops_count ? starts_count : stops_count;
    NEEDS(texts_fit(raw_count, offsets, offsets_count, folds_count, alone_count, at_once, folded_count, blocks_count,
                    starts_count, stops_count));
    NEEDS(letters_count >= room_for + SEED_LETTERS && before_count >= room_for && likely_count >= room_for);
    NEEDS(shift > 0 && shift < 64 && (uint64_t)bits_count > UINT64_MAX >> shift);
    NEEDS(seed_letters_count == seeds && seed_passages_count == seeds && seed_grams_count == seeds);
    NEEDS(seed_stops_count == seeds && seen_count == grams && word_bounds_count == gram_bounds_count);
    const Room room = {folded, (Block *)blocks, starts, stops};
    const Index index = {keys,        seed_letters, seed_passages, seed_grams,            seed_stops,  passage_letters,
                         ignored,     edges,        word_bounds,   gram_bounds,           seeds,       passage_letters_count,
                         edges_count, word_bounds_count - 1,       grams};
    Found found = {numbers, 0, numbers_count / NUMBERS, 0, seen};
    for (int64_t first = 0, stop; first < texts; first = stop) {
        for (stop = first + 1; stop < texts && offsets[stop + 1] - offsets[first] <= at_once;) stop++;
        const int64_t base = offsets[first] - offsets[0];
        const Texts some = {raw + base, offsets[stop] - offsets[first], offsets + first, stop - first, folds, alone};
        const int64_t words = list_words(&some, &room);
        gather_letters(&room, words, letters, before);
        const int64_t count = list_likely(letters, before, words, bits, shift, likely);
        Document document = {letters, before, &room, first - 1, 0, 0, base};
        for (int64_t k = 0; k < count; k++) {
            const int64_t word = likely[k];
            const uint64_t key = key_of(letters + before[word]);
            if (word >= document.stop_word) {
                close_document(&found);
                do document.document++;
                while (offsets[document.document + 1] - offsets[first] <= starts[word]);
                document.first_word = first_word(starts, words, offsets[document.document] - offsets[first]);
                document.stop_word = first_word(starts, words, offsets[document.document + 1] - offsets[first]);
            }
            for (int64_t seed = first_key(keys, seeds, key); seed < seeds && keys[seed] == key; seed++) {
                const int64_t problem = compare(&document, word, seed, &index, &found);
                if (problem) return problem;
            }
        }
        if (stop < texts || !open) close_document(&found);
    }
    return found.count;
}
