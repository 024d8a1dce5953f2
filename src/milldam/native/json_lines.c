/* JSON lines in valid UTF-8 -> the text of one field, for lines without any flaw or oddity.

   A line is taken when it is one JSON object by the letter of RFC 8259 that has the field once, as a string without
   halves of surrogate pairs. Of anything else nothing is said: another reader looks into it. */

#include "arrays.h"

#include <stddef.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

typedef const uint8_t *Place; /* in the lines; NULL: they can't be taken */

enum { DEEPEST = 64 };

static Place behind_blanks(Place at, Place end) {
    while (at < end && (*at == ' ' || *at == '\t' || *at == '\r')) at++;
    return at;
}

/* Behind `byte`, which may have blanks around it. */
static Place behind(uint8_t byte, Place at, Place end) {
    at = behind_blanks(at, end);
    return at < end && *at == byte ? behind_blanks(at + 1, end) : NULL;
}

/* ---- strings ---- */

/* Moves what needs no closer look, up to a quote, a backslash, a control character or the end. */
static Place copy_plain(Place at, Place end, uint8_t **out) {
    uint8_t *to = *out;
#ifdef __SSE2__
    const __m128i quote = _mm_set1_epi8('"'), backslash = _mm_set1_epi8('\\'), control = _mm_set1_epi8(0x1f);
    for (; end - at >= 16; at += 16, to += 16) {
        const __m128i some = _mm_loadu_si128((const __m128i *)at);
        _mm_storeu_si128((__m128i *)to, some);
        const __m128i low = _mm_cmpeq_epi8(_mm_min_epu8(some, control), some);
        const __m128i special = _mm_or_si128(_mm_cmpeq_epi8(some, quote), _mm_cmpeq_epi8(some, backslash));
        const int found = _mm_movemask_epi8(_mm_or_si128(low, special));
        if (found) {
            const int plain = __builtin_ctz((unsigned)found);
            *out = to + plain;
            return at + plain;
        }
    }
#endif
    while (at < end && *at != '"' && *at != '\\' && *at >= 0x20) *to++ = *at++;
    *out = to;
    return at;
}

/* The number that four hexadecimal digits stand for; -1: they are something else. */
static int32_t hexadecimal(Place at, Place end) {
    if (end - at < 4) return -1;
    int32_t value = 0;
    for (int digit = 0; digit < 4; digit++) {
        const uint8_t byte = at[digit], letter = byte | 0x20;
        if (byte >= '0' && byte <= '9') value = value << 4 | (byte - '0');
        else if (letter >= 'a' && letter <= 'f') value = value << 4 | (letter - 'a' + 10);
        else return -1;
    }
    return value;
}

/* What follows `\u`, as UTF-8: one escape, or both of a pair. */
static Place copy_code(Place at, Place end, uint8_t **out) {
    int32_t code = hexadecimal(at, end);
    if (code < 0 || (code >= 0xdc00 && code < 0xe000)) return NULL;
    at += 4;
    if (code >= 0xd800 && code < 0xdc00) {
        if (end - at < 6 || at[0] != '\\' || at[1] != 'u') return NULL;
        const int32_t low = hexadecimal(at + 2, end);
        if (low < 0xdc00 || low >= 0xe000) return NULL;
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
        at += 6;
    }
    uint8_t *to = *out;
    if (code < 0x80) {
        *to++ = (uint8_t)code;
    } else if (code < 0x800) {
        *to++ = (uint8_t)(0xc0 | code >> 6);
        *to++ = (uint8_t)(0x80 | (code & 0x3f));
    } else {
        if (code < 0x10000) {
            *to++ = (uint8_t)(0xe0 | code >> 12);
        } else {
            *to++ = (uint8_t)(0xf0 | code >> 18);
            *to++ = (uint8_t)(0x80 | (code >> 12 & 0x3f));
        }
        *to++ = (uint8_t)(0x80 | (code >> 6 & 0x3f));
        *to++ = (uint8_t)(0x80 | (code & 0x3f));
    }
    *out = to;
    return at;
}

/* What follows a backslash. */
static Place copy_escape(Place at, Place end, uint8_t **out) {
    if (at == end) return NULL;
    uint8_t byte;
    switch (*at++) {
    case 'n': byte = '\n'; break;
    case '"': byte = '"'; break;
    case '\\': byte = '\\'; break;
    case '/': byte = '/'; break;
    case 't': byte = '\t'; break;
    case 'r': byte = '\r'; break;
    case 'b': byte = '\b'; break;
    case 'f': byte = '\f'; break;
    case 'u': return copy_code(at, end, out);
    default: return NULL;
    }
    *(*out)++ = byte;
    return at;
}

/* A string whose opening quote lies before `at`, to `out`. It never gets longer, so that what was read is the room. */
static Place copy_string(Place at, Place end, uint8_t **out) {
    while (at != NULL) {
        at = copy_plain(at, end, out);
        if (at == end || *at < 0x20) return NULL;
        if (*at++ == '"') return at;
        at = copy_escape(at, end, out);
    }
    return NULL;
}

/* ---- values that are not wanted ---- */

static Place behind_string(Place at, Place end, uint8_t *scratch) {
    return at < end && *at == '"' ? copy_string(at + 1, end, &scratch) : NULL;
}

static Place behind_digits(Place at, Place end) {
    const Place first = at;
    while (at < end && *at >= '0' && *at <= '9') at++;
    return at > first ? at : NULL;
}

static Place behind_number(Place at, Place end) {
    if (at < end && *at == '-') at++;
    if (at < end && *at == '0') at++;
    else if ((at = behind_digits(at, end)) == NULL) return NULL;
    if (at < end && *at == '.' && (at = behind_digits(at + 1, end)) == NULL) return NULL;
    if (at < end && (*at | 0x20) == 'e') {
        at++;
        if (at < end && (*at == '+' || *at == '-')) at++;
        at = behind_digits(at, end);
    }
    return at;
}

static Place behind_word(const char *word, Place at, Place end) {
    const ptrdiff_t size = (ptrdiff_t)strlen(word);
    return end - at >= size && memcmp(at, word, (size_t)size) == 0 ? at + size : NULL;
}

/* A value that holds no others. */
static Place behind_scalar(Place at, Place end, uint8_t *scratch) {
    switch (*at) {
    case '"': return behind_string(at, end, scratch);
    case 't': return behind_word("true", at, end);
    case 'f': return behind_word("false", at, end);
    case 'n': return behind_word("null", at, end);
    default: return behind_number(at, end);
    }
}

static Place behind_name(Place at, Place end, uint8_t *scratch) {
    at = behind_string(at, end, scratch);
    return at != NULL ? behind(':', at, end) : NULL;
}

/* Any value. */
static Place behind_value(Place at, Place end, uint8_t *scratch) {
    uint64_t objects = 0; /* a bit for each that is open, the innermost lowest: an object, or an array */
    int depth = 0;
    while (at != NULL && at < end) {
        if (*at == '{' || *at == '[') {
            const uint8_t closing = *at == '{' ? '}' : ']';
            at = behind_blanks(at + 1, end);
            if (at == end || depth == DEEPEST) return NULL;
            if (*at != closing) {
                objects = objects << 1 | (closing == '}');
                depth++;
                if (objects & 1) at = behind_name(at, end, scratch);
                continue;
            }
            at++;
        } else if ((at = behind_scalar(at, end, scratch)) == NULL) {
            return NULL;
        }
        for (;; depth--, objects >>= 1, at++) {
            if (depth == 0) return at;
            at = behind_blanks(at, end);
            if (at == end || *at != (objects & 1 ? '}' : ']')) break;
        }
        at = behind(',', at, end);
        if (at != NULL && (objects & 1)) at = behind_name(at, end, scratch);
    }
    return NULL;
}

/* ---- lines ---- */

/* Up to the end of a line, whose text goes to `out`. */
static Place copy_text(Place at, Place end, Place name, int64_t name_size, uint8_t **out) {
    int found = 0;
    for (at = behind('{', at, end); at != NULL; at = behind(',', at, end)) {
        uint8_t *stop = *out;
        if (at == end || *at != '"' || (at = copy_string(at + 1, end, &stop)) == NULL) return NULL;
        const int wanted = stop - *out == name_size && memcmp(*out, name, (size_t)name_size) == 0;
        at = behind(':', at, end);
        if (at == NULL || at == end) return NULL;
        if (!wanted) at = behind_value(at, end, *out);
        else if (*at != '"' || found++) return NULL;
        else at = copy_string(at + 1, end, out);
        if (at == NULL) return NULL;
        at = behind_blanks(at, end);
        if (at < end && *at == '}') return found ? behind_blanks(at + 1, end) : NULL;
    }
    return NULL;
}

/* The texts of so many lines, end to end; `texts` has the room of `data`, `offsets` one entry more than there are lines.
   Gives the number of lines, or -1 when any of them is not to be taken. */
int64_t milldam_json_texts(const uint8_t *data, int64_t size, const uint8_t *name, int64_t name_size, uint8_t *texts,
                           int64_t room, int64_t *offsets, int64_t offsets_count) {
    NEEDS(room >= size && offsets_count > 0);
    const int64_t lines = offsets_count - 1;
    Place at = data, end = data + size;
    uint8_t *out = texts;
    offsets[0] = 0;
    for (int64_t line = 0; line < lines; line++) {
        at = copy_text(at, end, name, name_size, &out);
        if (at == NULL) return -1;
        offsets[line + 1] = out - texts;
        if (at < end && *at++ != '\n') return -1;
    }
    return at == end ? lines : -1;
}
