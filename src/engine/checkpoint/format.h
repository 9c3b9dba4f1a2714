#pragma once

#include <string>

namespace sherd::engine {

// A checkpoint is a folder:
//
//   DIR/latest                      the tag to resume from; moved last
//   DIR/TAG/manifest.json           counters, schedule, caller's strings, configuration, size and CRC-32C of
//                                   each file; at its end the CRC-32C of all before
//   DIR/TAG/rank_RRRRR.safetensors  what rank R owns of every tensor
//   DIR/TAG/tokenizer.model         the SentencePiece model of the training data, where it has one
//   DIR/.sherd.lock                 while a run saves there (engine/checkpoint/save_folder.h)
//
// One act of saving writes its own random "save" into the manifest and the metadata of all files, so that
// files of different ones are not taken for one checkpoint.
//
// Tensors carry parameter names and offsets, never offsets within units: "fp32.NAME" holds elements
// [b, b + n) of the master weights of parameter NAME, and the metadata entry of that tensor's name is b;
// likewise each of the optimizer's moments ("exp_avg.NAME", …) and "frozen.NAME" for parameters that do not
// train. So a reader can put any range of any parameter together, whatever the sharding was.

/// Name in the folder of a checkpoint: "rank_00007.safetensors".
std::string rank_file(int rank);

/// Key in the metadata of a rank's file of the act of saving.
inline constexpr const char* save_id_key = "sherd.save";

}  // namespace sherd::engine
