"""Store -> batches: what training needs, in constant memory, at the rate of memory copies. Needs numpy alone.

stream        a stretch of tokens over any number of files
reading       tokens by position: one gather from mapped files, or announced reads for data beyond memory;
              cached_reading: of files that come through a cache
permutation   a keyed permutation of [0, n), computed where it is needed
order         shuffled in all ways, by length, or in sequence: place -> number of a sample
types         what samples and batches are made of
samples       what every view has in common
windows       sample k is the tokens from k * stride on; contiguous streams for models that carry state
packed        rows of documents, with their boundaries
conversations documents one by one, and in pairs
boundaries    position -> document, and which of its tokens are trained on, from the mapped indexes
row_pieces    which documents rows are made of; best-fit rows, planned once and kept in a file
feeds         data that may still be in the making, with the verbs of a store
feed_samples  samples of parts that come one after the other
unit_order    what a feed is made of, and in which order: units, and samples of some parts at a time
mixing        several sources by weight
mixed_reading samples of several sources in one read, or source by source
mixed_order   which source comes when, exact in every block
steps         samples looked up, announced, and read into arrays of earlier batches
batches       samples -> batches: ranks, epochs, state, loops that can be left, gone on with and moved
views         the verbs: windows, packed, streams, split
stores        a store with these verbs
opening       what a path is, how it is opened, and whether what was prepared from an input is fresh
"""
