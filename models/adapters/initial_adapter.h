#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "models/adapters/layer_products.h"
#include "models/gpt_config.h"
#include "models/hub/adapter_targets.h"
#include "nn/weight_source.h"

// The initial values of an adapter that are computed from its base's weights.
namespace sherd::models {

/// Products with which LoRA begins where they are a part of the weights (config::takes_from_base()), as
/// Gpt's layers have them, and kept: as much memory as the adapter takes in fp32.
class InitialProducts {
 public:
  /// `base`: the model's weights, which must outlive it. `device`: its memory buffers what is read.
  InitialProducts(nn::WeightSource& base, const GptConfig& config, device::Device& device)
      : base_(base),
        config_(config.resolved()),
        device_(device),
        processor_(device::make_cpu_device(device.arena().threads())) {}
  struct Layer : LayerProducts {
    AdaptedWeight adapted;
  };
  /// The products of the layer with that path, "blocks.0.attention.qkv"; null where it has no adapter.
  const Layer* of(const std::string& layer);
  nn::WeightSource& base() const { return base_; }
  device::Device& device() const { return device_; }

 private:
  nn::WeightSource& base_;
  GptConfig config_;
  device::Device& device_;
  std::shared_ptr<device::Device> processor_;  ///< a CPU device, which decomposes weights
  std::map<std::string, Layer> layers_;
};

/// Gives the parameters of an adapter that begin as the base's weights say: DoRA's magnitudes, the norms of
/// the rows of weights as the run keeps them; rows of tokens; LoRA's products where these are `products`. Has
/// nothing else.
class InitialAdapter : public nn::WeightSource {
 public:
  /// `config`: the model with its adapter. `device`: its memory buffers what is read. `base` and `products`
  /// (null: there are none) must outlive it.
  InitialAdapter(nn::WeightSource& base, const GptConfig& config, device::Device& device,
                 InitialProducts* products = nullptr)
      : base_(base), config_(config.resolved()), device_(device), products_(products) {}
  /// Whether an adapter has any of these.
  static bool is_for(const config::Adapter& adapter);
  void check(const std::vector<nn::ParameterPtr>&) const override {}
  bool has(const std::string& name) const override;
  void read(const std::string& name, const tensor::Slice& slice, std::int64_t begin,
            const tensor::Tensor& to) override;

 private:
  std::vector<float> magnitudes(const std::string& layer);
  std::vector<float> token_rows(const std::string& table);

  nn::WeightSource& base_;
  GptConfig config_;
  device::Device& device_;
  InitialProducts* products_;
  std::string name_;           ///< which was asked for last
  std::vector<float> values_;  ///< all of it
};

/// An adapter that began as a part of the weights (PiSSA, OLoRA), rewritten as plain LoRA beside the model's
/// own weights: of twice the rank, [A; A₀] and [B, -B₀] (PEFT's path_initial_model_for_weight_conversion).
class PlainLora : public nn::WeightSource {
 public:
  /// `adapter`: the model's adapter, and all other weights that are asked for; `products`: the products as
  /// which the adapter began. Both must outlive it.
  PlainLora(nn::WeightSource& adapter, InitialProducts& products, device::Device& device)
      : adapter_(adapter), products_(products), device_(device) {}
  /// The keys of the plain LoRA that stands for `adapter`.
  static config::Adapter keys(const config::Adapter& adapter);
  void check(const std::vector<nn::ParameterPtr>&) const override {}
  void read(const std::string& name, const tensor::Slice& slice, std::int64_t begin,
            const tensor::Tensor& to) override;

 private:
  nn::WeightSource& adapter_;
  InitialProducts& products_;
  device::Device& device_;
  std::string name_;           ///< which was asked for last
  std::vector<float> values_;  ///< all of it
};

/// The weights of a model whose LoRA begins as a part of them, without that part: W - scale·B·A.
class WithoutProducts : public nn::ForwardedWeights {
 public:
  /// `products` must outlive it.
  explicit WithoutProducts(InitialProducts& products)
      : ForwardedWeights(products.base()), products_(products) {}
  void read(const std::string& name, const tensor::Slice& slice, std::int64_t begin,
            const tensor::Tensor& to) override;

 private:
  InitialProducts& products_;
};

}  // namespace sherd::models
