/* Which C files this library was made from; `build.py` says it. */

const char *milldam_digest(void) { return MILLDAM_DIGEST; }
