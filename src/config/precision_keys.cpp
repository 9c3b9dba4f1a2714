#include "config/tables.h"

namespace sherd::config {
namespace {

struct Fp16Section {
  bool enabled = false;
  LossScaling scaling;
};

struct Bf16Section {
  bool enabled = false;
  bool check_grad_overflow = true;
};

constexpr const char* fp32_masters = "masters stay fp32; training.moments_dtype \"bf16\" halves the moments";

std::vector<Text> fp16_texts() {
  return {
      {"enabled", "compute in fp16, with loss scaling, beside fp32 masters; not together with `bf16`"},
      {"loss_scale", "factor of the loss; 0: dynamic"},
      {"initial_scale_power", "the dynamic scale begins at 2 to the power of this",
       "0.16 began at 2³² where no key of the scale was given"},
      {"loss_scale_window", "steps without an overflow before the scale doubles",
       "in the step in which it doubles, gradients there are divided by the new scale; here by that which "
       "they were "
       "computed with"},
      {"hysteresis", "overflows before the scale halves"},
      {"consecutive_hysteresis", "each step without an overflow refills the hysteresis"},
      {"min_loss_scale", "least dynamic scale; an overflow there ends the run", "takes whole numbers alone"},
      {"auto_cast", "cast inputs of forward to fp16"},
      {"fp16_master_weights_and_grads", "masters and their gradients in fp16"},
      {"opt_level", "apex's level of mixed precision"},
      {"type", "GPT-NeoX's name of the type to compute in"},
  };
}

Table<Fp16Section> fp16_table() {
  const auto scaling = &Fp16Section::scaling;
  Table<Fp16Section> table;
  table.auto_rule = Auto::to_default;
  table.keys.push_back(boolean("enabled", &Fp16Section::enabled).with_auto(Auto::needs_caller));
  table.keys.push_back(inside(scaling, real("loss_scale", &LossScaling::loss_scale, "128", 0)));
  table.keys.push_back(
      inside(scaling, integer("initial_scale_power", &LossScaling::initial_scale_power, "8", 0, 100)));
  table.keys.push_back(
      inside(scaling, integer("loss_scale_window", &LossScaling::loss_scale_window, "50", 1)));
  table.keys.push_back(inside(scaling, integer("hysteresis", &LossScaling::hysteresis, "3", 1)));
  table.keys.push_back(
      inside(scaling, boolean("consecutive_hysteresis", &LossScaling::consecutive_hysteresis)));
  table.keys.push_back(
      inside(scaling, real("min_loss_scale", &LossScaling::min_loss_scale, "4", 0, infinity, true)));
  table.keys.push_back(noted<Fp16Section>("auto_cast", Holds::boolean,
                                          "Tape::input() always casts floating inputs to the model's dtype"));
  table.keys.push_back(refused<Fp16Section>("fp16_master_weights_and_grads", "true", fp32_masters, is_false));
  table.keys.push_back(noted<Fp16Section>(
      "opt_level", Holds::text, "apex's, which DeepSpeed reads in the section amp alone; weights are fp16"));
  table.keys.back().example = "\"O2\"";
  table.keys.push_back(refused<Fp16Section>("type", "\"bfloat16\"",
                                            "GPT-NeoX's DeepSpeed then computes in bf16, others in fp16; "
                                            "give \"bf16\": {\"enabled\": true}, or drop it",
                                            [](const Value& value) {
                                              return parse_dtype(value.text()) == DType::f16 ||
                                                     value.text() == "float16";
                                            }));
  describe(table.keys, fp16_texts());
  return table;
}

Table<Bf16Section> bf16_table() {
  Table<Bf16Section> table;
  table.auto_rule = Auto::to_default;
  table.keys.push_back(boolean("enabled", &Bf16Section::enabled).with_auto(Auto::needs_caller));
  table.keys.push_back(boolean("check_grad_overflow", &Bf16Section::check_grad_overflow));
  table.keys.push_back(noted<Bf16Section>("immediate_grad_update", Holds::boolean,
                                          "gradients are always accumulated as backward makes them"));
  for (const char* name :
       {"loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"})
    table.keys.push_back(noted<Bf16Section>(name, Holds::real, "bf16 has no loss scale"));
  for (const char* name : {"auto_cast", "consecutive_hysteresis"})
    table.keys.push_back(noted<Bf16Section>(name, Holds::boolean, "of fp16 alone"));
  table.keys.push_back(refused<Bf16Section>(
      "bf16_master_weights_and_grads", "true",
      "masters stay fp32, of which training.split_masters keeps 2 bytes beside the bf16 parameter",
      is_false));
  table.keys.push_back(refused<Bf16Section>("bf16_optimizer_states", "true",
                                            "give training.moments_dtype \"bf16\" instead; masters stay fp32",
                                            is_false));
  describe(table.keys, {{"enabled", "compute in bf16 beside fp32 masters; not together with `fp16`"},
                        {"check_grad_overflow", "skip a step whose gradients hold infinities or NaN",
                         "checks at stages 1 and 2 alone; 0.16 never"},
                        {"immediate_grad_update", "add each gradient to the fp32 buffer as it is made"},
                        {"bf16_master_weights_and_grads", "masters and their gradients in bf16"},
                        {"bf16_optimizer_states", "moments in bf16"},
                        {"loss_scale", "`fp16`'s key of this name"},
                        {"initial_scale_power", "`fp16`'s key of this name"},
                        {"loss_scale_window", "`fp16`'s key of this name"},
                        {"hysteresis", "`fp16`'s key of this name"},
                        {"min_loss_scale", "`fp16`'s key of this name"},
                        {"auto_cast", "`fp16`'s key of this name"},
                        {"consecutive_hysteresis", "`fp16`'s key of this name"}});
  return table;
}

// One precision for the run: enabling both sections is an error at the second.
void set_compute(Config& config, DType dtype, const Value& section) {
  if (config.precision.compute != DType::f32)
    section.error("fp16 and bf16 are both enabled; enable one of them");
  config.precision.compute = dtype;
}

void read_fp16(Config& config, const Value& section) {
  Fp16Section fp16;
  read_section(fp16_table(), fp16, section);
  const LossScaling& scaling = fp16.scaling;
  if (fp16.enabled && scaling.dynamic() && scaling.initial_scale() < scaling.min_loss_scale)
    section.error("the initial loss scale 2^", scaling.initial_scale_power, " is below min_loss_scale ",
                  scaling.min_loss_scale);
  config.precision.fp16 = scaling;
  if (fp16.enabled)
    set_compute(config, DType::f16, section);
  else
    section.note("not enabled, no effect");
}

void read_bf16(Config& config, const Value& section) {
  Bf16Section bf16;
  read_section(bf16_table(), bf16, section);
  config.precision.check_grad_overflow = bf16.check_grad_overflow;
  if (bf16.enabled)
    set_compute(config, DType::bf16, section);
  else
    section.note("not enabled, no effect");
}

const std::vector<std::string> dtypes = {"fp32", "fp16", "bf16"};

DType read_dtype(const Value& value) {
  constexpr DType in_order[] = {DType::f32, DType::f16, DType::bf16};
  if (const auto dtype = parse_dtype(value.text()); dtype && size_of(*dtype) <= 4 && is_floating(*dtype))
    return *dtype;
  return in_order[value.choice(dtypes)];
}

Table<Precision> data_types_table() {
  Table<Precision> table;
  table.keys.push_back(
      custom<Precision>("grad_accum_dtype", "\"fp32\"", [](Precision& precision, const Value& value) {
        precision.grad_accum_dtype = read_dtype(value);
      }).one_of(dtypes));
  table.keys.push_back(
      noted<Precision>("param_dtype", Holds::text, "follows from the sections fp16 and bf16"));
  table.keys.back().example = "\"fp32\"";
  table.keys.push_back(
      noted<Precision>("buffer_dtype", Holds::text, "Sherd's models hold no floating-point buffers"));
  describe(table.keys,
           {derived("grad_accum_dtype", "the model's",
                    "type in which gradients accumulate: fp32, or the model's own",
                    "0.16: fp32 for bf16 without ZeRO"),
            {"param_dtype", "type of the parameters; one that contradicts the model's is an error"},
            {"buffer_dtype", "type of buffers"}});
  return table;
}

}  // namespace

std::vector<Key<Config>> precision_keys() {
  std::vector<Key<Config>> keys;
  Key<Config> fp16 = custom<Config>("fp16", "", read_fp16);
  fp16.list = [](const std::string& prefix, std::vector<KeyInfo>& out) {
    list_keys(fp16_table(), prefix, out);
  };
  keys.push_back(std::move(fp16));
  Key<Config> bf16 = custom<Config>("bf16", "", read_bf16).alias("bfloat16");
  bf16.list = [](const std::string& prefix, std::vector<KeyInfo>& out) {
    list_keys(bf16_table(), prefix, out);
  };
  keys.push_back(std::move(bf16));
  keys.push_back(section("data_types", &Config::precision, data_types_table()));
  keys.push_back(custom<Config>("communication_data_type", "\"bf16\"",
                                [](Config& config, const Value& value) {
                                  config.precision.communication_data_type = read_dtype(value);
                                })
                     .with_auto(Auto::to_default)
                     .one_of(dtypes));
  describe(keys.back(),
           derived("communication_data_type", "the model's",
                   "type to which each rank's gradients are rounded before they travel; sums are fp32",
                   "sums are of that type there, in the order of NCCL's algorithm"));
  keys.push_back(noted<Config>("seq_parallel_communication_data_type", Holds::text,
                               "activations travel in the model's type, gradients of the ring in fp32")
                     .alias("seq_parallel_comm_data_type"));
  describe(keys.back(),
           Text{"seq_parallel_communication_data_type", "type of what sequence-parallel ranks sum"});
  return keys;
}

void check_precision(const Config& config, const Given& given) {
  const Precision& precision = config.precision;
  if (!given.contains("data_types")) return;
  const Node& section = *given.at("data_types");
  const DType accumulate = precision.gradient_dtype();
  if (const Node* node = section.find("grad_accum_dtype");
      node && accumulate != DType::f32 && accumulate != precision.compute)
    fail(ErrorKind::config, node->place.str(), ": data_types.grad_accum_dtype: ", node->brief(),
         " does not go with a model in ", name_of(precision.compute), "; use \"fp32\" or \"",
         name_of(precision.compute), "\"");
  if (const Node* node = section.find("param_dtype"); node && node->is(Node::Kind::string))
    if (parse_dtype(node->text) != precision.compute)
      fail(ErrorKind::config, node->place.str(), ": data_types.param_dtype: ", node->brief(),
           " contradicts the model's ", name_of(precision.compute),
           "; choose the precision with the sections fp16 and bf16");
}

}  // namespace sherd::config
