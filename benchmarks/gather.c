/* The least that any loader must do: copy the slices of a batch out of the mapped tokens and widen them to int64.
 *
 * tokens   the mapped file
 * starts   (batches * batch_size,): where each sample begins
 * x, y     (batch_size, seq_len): used again for every batch, so they stay in the processor's cache
 */
#include <stdint.h>

void gather(const uint16_t *tokens, const int64_t *starts, int64_t batches, int64_t batch_size, int64_t seq_len,
            int64_t *restrict x, int64_t *restrict y)
{
    for (int64_t batch = 0; batch < batches; batch++) {
        for (int64_t row = 0; row < batch_size; row++) {
            const uint16_t *from = tokens + starts[batch * batch_size + row];
            int64_t *restrict to_x = x + row * seq_len;
            int64_t *restrict to_y = y + row * seq_len;
            for (int64_t i = 0; i < seq_len; i++)
                to_x[i] = from[i];
            for (int64_t i = 0; i < seq_len; i++)
                to_y[i] = from[i + 1];
        }
    }
}
