"""Store -> batches: what training needs, in constant memory, at the rate of memory copies. Needs numpy alone.

Three ideas. An order takes a place in the endless sequence of samples to the number of a sample; it is computed, not
stored. Samples take a number to stretches of tokens, and these to arrays. Batches are places of the sequence: their
state is one number, for any number of ranks.

stream        a stretch of tokens over any number of files
reading       tokens by position: one gather from mapped files, or announced reads for data beyond memory, also of files
              that come through a cache
permutation   a keyed permutation of [0, n), computed where it is needed
order         shuffled in all ways, by length, or in sequence: place -> number of a sample
types         the types of samples and batches
samples       the seam: what every kind of samples has in common, and where a sample lies
windows       sample k is the tokens from k * stride on; contiguous streams for models that carry state
documents     position -> document, and which of its tokens are trained on, from the mapped indexes
packed        rows of documents, with their boundaries; best-fit rows are planned once and kept in a file
conversations documents one by one, and in pairs
mixing        several sources by weight, in one read or source by source
feeds         data that may still be in the making; unit_order: the order of its units and parts
batches       samples -> batches: ranks, epochs, state, loops that can be left, continued and moved
views         the methods that turn data into samples: windows, packed, streams, split
stores        a store with these methods
opening       which kind of data a path is
"""
