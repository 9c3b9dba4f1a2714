#pragma once

#include "tensor/cpu/isa/tables.h"
#include "tensor/formats/stored_format.h"

// Weights in few bits are read by parts: the fewest consecutive elements that stand by themselves. They are
// a format's blocks, and of double ones their 64 elements with a scale.
namespace sherd::tensor::cpu {

/// Elements of a part.
Count stored_part(StoredFormat format);

/// The values of `count` parts of `blocks`, from part `first` on, into `to`, of the type that `out` is the
/// table of. `stream`: past the caches, to where the largest register may be stored. Any thread may call.
void read_stored(const IsaTable& isa, StoredFormat format, const std::byte* blocks, Count first, Count count,
                 StorageIndex out, bool stream, std::byte* to);

}  // namespace sherd::tensor::cpu
