#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "engine/checkpoint/manifest.h"
#include "tensor/safetensors/safetensors.h"
#include "tensor/slice.h"

namespace sherd::engine {

using tensor::SafetensorsEntry;
using tensor::SafetensorsFile;
using tensor::SafetensorsSpec;
using tensor::SafetensorsWriter;

// A checkpoint is a folder:
//
//   DIR/latest                      the tag to resume from; moved last
//   DIR/TAG/manifest.json           counters, schedule, caller's strings, configuration, size and CRC-32C of
//                                   each file; at its end the CRC-32C of all before
//   DIR/TAG/rank_RRRRR.safetensors  what rank R owns of every tensor that training changes
//   DIR/TAG/rank_RRRRR.frozen.safetensors
//                                   what it owns of those that training leaves as they are; no file: nothing,
//                                   or the manifest's "base" names the files that hold them
//                                   (frozen/referenced_base.h)
//   DIR/TAG/tokenizer.model         the SentencePiece model of the training data, where it has one, or
//   DIR/TAG/tokenizer.json          that of its tokenizer
//   DIR/.sherd.lock                 while a run saves there (engine/checkpoint/save_folder.h)
//
// One act of saving writes its own random "save" into the manifest and the metadata of all files, so that
// files of different ones are not taken for one checkpoint. Frozen files bear the manifest's "frozen": the id
// of the first act with what they hold. Those after it have hard links to the same files, or files of the
// same bytes (engine/checkpoint/frozen/frozen_files.h).
//
// A tensor of a rank's file is called KIND.PARAMETER: "fp32.NAME" for the master weights of parameter NAME,
// likewise each of the optimizer's moments ("exp_avg.NAME", …), and "frozen.NAME" for parameters that do not
// train. It is flat, and the metadata entry of its name says which elements it holds (PieceRecord): a run of
// local elements of a slice of the logical tensor. Units, ranks and offsets within segments appear nowhere,
// so a reader can put any slice of any parameter together, whatever the sharding and the layout were.
// Together the files hold every element; where two hold the same one they agree.
//
// A frozen parameter that a run keeps in few bits is a tensor of bytes: the blocks of its elements, from the
// first of a block of the slice on (tensor/formats/stored_format.h). No other has this type.

/// Name in the folder of a checkpoint: "rank_00007.safetensors".
std::string rank_file(int rank);
/// "rank_00007.frozen.safetensors".
std::string frozen_file(int rank);
/// Whether a file of a checkpoint is such a one.
bool is_frozen_file(const std::string& name);

/// Size and CRC-32C of a file, which it reads whole. Throws Error{io}.
FileChecksum checksum_file(const std::filesystem::path& path);

/// Key in the metadata of a rank's file of the act of saving.
inline constexpr const char* save_id_key = "sherd.save";

/// This prefix and a parameter's name are the key, in the metadata of a rank's file, of what the optimizer
/// has learned of the whole parameter (ParameterNorms::save()). Files with the same key agree.
inline constexpr const char* learned_prefix = "sherd.learned.";

/// The manifest's "format" begins so, whatever its number; this build reads and writes checkpoint_format.
inline constexpr std::string_view format_prefix = "sherd-checkpoint-";
inline constexpr std::string_view checkpoint_format = "sherd-checkpoint-5";

/// Which elements of a parameter a tensor of a file holds: local elements [elements.begin, elements.end) of
/// `slice`.
struct PieceRecord {
  tensor::Slice slice;
  tensor::Range elements;
  StoredFormat format = StoredFormat::compute;  ///< of a tensor of bytes

  /// {"shape": [8, 6], "slice": [[[0, 2], [4, 6]], [[0, 6]]], "begin": 12}: the logical shape, the blocks of
  /// each dimension, the first element; and "format": "nf4" of a tensor of bytes, but of int8.
  std::string to_json() const;
  /// Reads what a file of `manifest` says of a tensor of `parameter` with `numel` numbers of `dtype`. Throws
  /// Error{data} saying what is wrong.
  static PieceRecord parse(const std::string& text, const Manifest& manifest, const std::string& parameter,
                           std::int64_t numel, std::optional<DType> dtype = DType::f32);
};

}  // namespace sherd::engine
