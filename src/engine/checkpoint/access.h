#pragma once

#include <exception>
#include <filesystem>
#include <string>

#include "engine/checkpoint.h"
#include "engine/engine.h"

namespace sherd::engine {

/// The engine's half of saving and loading.
class CheckpointAccess {
 public:
  static void claim(Engine& engine, const std::string& directory);
  static void save(Engine& engine, const std::string& directory, const std::string& tag,
                   const ClientState& client);
  static ClientState load(Engine& engine, const std::string& directory, const std::string& tag);

 private:
  static Manifest describe(const Engine& engine, const ClientState& client);
  static std::exception_ptr end_failed_pass(Engine& engine);
  static std::string begin_save(Engine& engine, const std::filesystem::path& base, const std::string& tag);
  static void take_folder(Engine& engine, const std::string& directory);
  static CheckpointReader open(Engine& engine, const std::string& directory, const std::string& tag);
  static void forget_findings(Engine& engine);
  static void restore_counters(Engine& engine, const Manifest& manifest);
  static void restore_data(Engine& engine, const CheckpointReader& reader);
};

}  // namespace sherd::engine
