#pragma once

namespace sherd::config {

// Every key of DeepSpeed's, of PEFT's and of AdapterHub's that Sherd knows and that sets nothing here. Below
// its section (of the types that have it), a key has
//   its names | what it may hold | what it asks for | why it has no effect, or is refused
// and a section the names of its keys behind that. "boolean" and other forms, below, are accepted without
// effect. "but false: true" is refused, but for false; true is an example of what is refused.
inline constexpr const char* foreign_table = R"table(
[zero_optimization]
cpu_offload_use_pin_memory | boolean | page-locked memory for what is offloaded | deprecated; give pin_memory
    in offload_param or offload_optimizer
contiguous_gradients | boolean | copy gradients into one buffer as they are made | always on in Sherd
reduce_scatter | boolean | reduce each slice to its owner alone, not an all-reduce | every reduction is a
    reduce-scatter in Sherd
use_multi_rank_bucket_allreduce | boolean | reduce slices of several owners in one call | every reduction is a
    reduce-scatter in Sherd
allgather_partitions | boolean | gather updated parameters by all-gather, not by broadcasts | partitions are
    always all-gathered in Sherd
round_robin_gradients | boolean | ranks copy different gradients to the host at a time | each rank copies only
    its own gradients to the host
memory_efficient_linear | boolean | linear layers that keep no gathered weight for backward | Sherd's linear
    layers keep no gathered weight
pipeline_loading_checkpoint | boolean | load checkpoints shard after shard | checkpoints load shard by shard
    in Sherd
override_module_apply | boolean | `Module.apply` gathers parameters | concerns PyTorch modules
log_trace_cache_warnings | boolean | warn where the order of modules changes | Sherd keeps no trace cache
load_from_fp32_weights | boolean | restore fp32 masters from a checkpoint's, not from 16-bit weights |
    checkpoints always restore the fp32 masters
ignore_unused_parameters | boolean | allow parameters without a gradient | parameters without a gradient are
    always allowed
compute_grad_norm | boolean | false: gradients' norm is left out where nothing needs it | the norm of
    gradients is always computed
parameter_alignment | boolean | pad parameters to 16 bytes in the flat buffer | parameters are always aligned,
    whatever their sizes
elastic_checkpoint | boolean | checkpoints for another number of ranks | checkpoints load on any number of
    ranks
leaf_module | anything | modules that are fetched whole | what is gathered together are the blocks that a
    model marks
stage3_module_granularity_threshold|module_granularity_threshold | count | fetch small modules whole | what is
    gathered together are the blocks that a model marks
enable_sanity_checks | boolean | more assertions | Sherd's checks are always on
mics_hierarchical_params_gather | boolean | gather parameters in two steps, between machines and within | one
    all-gather within the ranks that share states brings parameters
stage3_use_all_reduce_for_fetch_params|use_all_reduce_for_fetch_params | boolean | fetch parameters by
    all-reduce | parameters are always fetched by all-gather
stage3_gather_16bit_weights_on_model_save|gather_16bit_weights_on_model_save|
    stage3_gather_fp16_weights_on_model_save | boolean | gather 16-bit weights for `save_16bit_model()` |
    checkpoints hold the fp32 weights by name; no 16-bit copy is gathered
legacy_stage1 | but false: true | the first implementation of stage 1 | DeepSpeed removed it too; give stage 1
save_muon_momentum_buffer_in_memory | but false: true | Muon's momenta in memory at stage 3 | Muon's momenta
    lie where offload_optimizer says
stage3_allgather_sequential|allgather_sequential | but false: true | gather one parameter at a time | set
    stage3_prefetch_bucket_size to 1 instead
zero_hpz_partition_size | but at most 1: 4 | ZeRO++ hpZ: a second copy of the parameters on so many ranks |
    ZeRO++ is not in this build; parallel.shard_size keeps gathers within a machine
zero_quantized_weights | but false: true | ZeRO++: gather weights in 8 bits | ZeRO++ is not in this build;
    OneBitAdam compresses what replicas exchange
zero_quantized_nontrainable_weights | but false: true | ZeRO++: keep frozen weights in 8 bits | ZeRO++ is not
    in this build; OneBitAdam compresses what replicas exchange
zero_quantized_gradients | but false: true | ZeRO++: reduce gradients in 4 bits | ZeRO++ is not in this build;
    OneBitAdam compresses what replicas exchange
zeropp_loco_param | but empty: {"err_beta": 0.8} | ZeRO++: error feedback of these gradients | ZeRO++ is not
    in this build; OneBitAdam compresses what replicas exchange
zenflow | but empty: {"topk_ratio": 0.1} | update important gradients first, others later | ZenFlow is not in
    this build; offload_optimizer reads and writes beside computing

[zero_optimization.offload_optimizer]
fast_init | boolean | make fp32 masters on NVMe through page-locked buffers | states are always written
    straight to where they live
super_offload | but false: true | SuperOffload: split the update between GPU and CPU | SuperOffload is not in
    this build; ratio leaves a share on the device
cpuadam_cores_perc | number | SuperOffload: share of the cores that update | SuperOffload is off

[aio]
use_gds | but false: true | GPUDirect Storage | it needs CUDA's GPUDirect Storage, which is not in this build;
    transfers pass through host memory

[activation_checkpointing]
partition_activations | boolean | cut kept activations over model-parallel ranks | training.recompute chooses
    what is recomputed, and Sherd how
contiguous_memory_optimization | boolean | copy kept activations into one buffer | training.recompute chooses
    what is recomputed, and Sherd how
synchronize_checkpoint_boundary | boolean | synchronize the device at every block | training.recompute chooses
    what is recomputed, and Sherd how
profile | boolean | time every block | training.recompute chooses what is recomputed, and Sherd how
number_checkpoints | count | how many blocks are kept | training.recompute chooses what is recomputed, and
    Sherd how

[fp16]
auto_cast | boolean | cast inputs of forward to fp16 | Tape::input() always casts floating inputs to the
    model's dtype
fp16_master_weights_and_grads | but false: true | masters and their gradients in fp16 | masters stay fp32;
    training.moments_dtype "bf16" halves the moments
opt_level | string | apex's level of mixed precision | apex's, which DeepSpeed reads in the section amp alone;
    weights are fp16
type | but fp16: "bfloat16" | GPT-NeoX's name of the type to compute in | GPT-NeoX's DeepSpeed then computes
    in bf16, others in fp16; give "bf16": {"enabled": true}, or drop it

[bf16]
immediate_grad_update | boolean | add each gradient to the fp32 buffer as it is made | gradients are always
    accumulated as backward makes them
loss_scale | number | `fp16`'s key of this name | bf16 has no loss scale
initial_scale_power | number | `fp16`'s key of this name | bf16 has no loss scale
loss_scale_window | number | `fp16`'s key of this name | bf16 has no loss scale
hysteresis | number | `fp16`'s key of this name | bf16 has no loss scale
min_loss_scale | number | `fp16`'s key of this name | bf16 has no loss scale
auto_cast | boolean | `fp16`'s key of this name | of fp16 alone
consecutive_hysteresis | boolean | `fp16`'s key of this name | of fp16 alone
bf16_master_weights_and_grads | but false: true | masters and their gradients in bf16 | masters stay fp32, of
    which training.split_masters keeps 2 bytes beside the bf16 parameter
bf16_optimizer_states | but false: true | moments in bf16 | give training.moments_dtype "bf16" instead;
    masters stay fp32

[data_types]
param_dtype | dtype | type of the parameters; one that contradicts the model's is an error | follows from the
    sections fp16 and bf16
buffer_dtype | dtype | type of buffers | Sherd's models hold no floating-point buffers

[optimizer]
legacy_fusion | boolean | an older kernel of fp16 Adam | concerns DeepSpeed's fp16 wrappers

[optimizer.params]
max_grad_norm | but nothing: 1.0 | largest norm of the gradients | clip with the top-level key
    "gradient_clipping"
maximize | but false: true | climb instead of descend | training minimises the loss
foreach | boolean | PyTorch: one call for all parameters | chooses among PyTorch's kernels; Sherd has one,
    fused
fused | boolean | PyTorch: one kernel per step | chooses among PyTorch's kernels; Sherd has one, fused
capturable | boolean | PyTorch: a step that CUDA graphs can hold | chooses among PyTorch's kernels; Sherd has
    one, fused
differentiable | boolean | PyTorch: a step with a gradient | chooses among PyTorch's kernels; Sherd has one,
    fused

[optimizer.params of Adam AdamW Adagrad Lamb NVLamb OneBitAdam OneBitLamb AdamW8bit]
amsgrad | but false: true | divide by the largest second moment so far | the AMSGrad variant is not in this
    build

[optimizer.params of Adam AdamW Lion Adagrad AdamW8bit]
fp32_optimizer_states | but true: false | moments in fp32 | give training.moments_dtype "bf16" instead

[optimizer.params of AdamW AdamW8bit]
adam_w_mode | boolean | decoupled decay, as AdamW's; false: L2, in the gradient | type AdamW decouples the
    decay whatever it says

[optimizer.params of Muon]
adam_w_mode | but true: false | decoupled decay, as AdamW's; false: L2, in the gradient | what Muon leaves
    goes to AdamW, whose decay is decoupled
ns_method | string | how products are ordered: gram or standard | Sherd has one way to iterate, the published
    one

[optimizer.params of SGD LARS]
dampening | but 0: 0.1 | how little of the gradient enters the momentum | dampening is 0 in this build

[optimizer.params of LARS]
nesterov | but false: true | look ahead along the momentum; needs a momentum above 0 | LARS has plain momentum

[optimizer.params of Lion]
set_grad_none | boolean | drop gradients rather than zero them | concerns PyTorch's buffers of gradients

[optimizer.params of Lamb OneBitAdam OneBitLamb]
eps_inside_sqrt | but false: true | add `eps` before the root is taken | eps stands outside of the root

[optimizer.params of OneBitAdam OneBitLamb]
bias_correction | boolean | moments are divided by 1 − βᵗ | 1-bit optimizers correct no bias, here as in
    DeepSpeed
cuda_aware | boolean | MPI that reads GPU memory | momentum travels by the communicator that gradients do
comm_backend_name | string | library by which momentum travels | momentum travels by the communicator that
    gradients do

[scheduler.params]
last_batch_iteration | but -1: 5 | where the schedule begins | the position comes from the checkpoint on
    resume

[parallel]
sequence | but one rank: 2 | a size of sequence parallelism | parallel.sequence_parallel (with
    parallel.tensor) cuts what lies between a layer's products along the sequence, parallel.context all of it:
    give one of these

[tensor_parallel.tp]
tp_grain_size | count | of which sizes slices are multiples | heads and rows are cut evenly
mpu | anything | an object that knows the groups of ranks | `parallel` says which ranks hold slices
tp_group | anything | a group of ranks | `parallel` says which ranks hold slices

[tensor_parallel]
preset_model | anything | the family whose layers are to be cut | a model's layers say themselves how they are
    cut
partition_config | anything | patterns of the layers to cut | a model's layers say themselves how they are cut
injection_policy_tuple | anything | modules whose sums are to be all-reduced | a model's layers say themselves
    how they are cut
dtype | string | type of the cut parameters | bf16 and fp16 say it
keep_module_on_host | boolean | cut parameters in host memory | offload_param says it
replace_with_kernel_inject|kernel_inject | boolean | modules of DeepSpeed's own kernels | kernels are Sherd's
    own
tp_overlap_comm | boolean | all-reduce beside computation | reductions run beside weight gradients anyway
vocab_parallel_lm_head | anything | cut the head along the vocabulary | the table and the head are cut along
    the vocabulary
vocab_parallel_ce_backend | string | whose cross-entropy over it | the loss of a cut head is Sherd's own

[pipeline]
seed_layers | boolean | seed initial values by layer | initial values go by a parameter's name, the same in
    every cut
pipe_partitioned | boolean | cut what stages send over tensor ranks | tensor ranks send what they have: their
    part, with parallel.sequence_parallel
grad_partitioned | boolean | cut the gradients that they send over tensor ranks | tensor ranks send what they
    have: their part, with parallel.sequence_parallel
use_reentrant | boolean | PyTorch's older recompute | concerns PyTorch's recompute

[training.adapter]
load_in_8bit | but false: true | bitsandbytes' name of a base in 8 bits | write "base_format": "int8" for
    a base in 8 bits
load_in_4bit | but off: true | its base in 4 bits | write "base_format": "nf4" for a base in 4 bits
bias | but off: "all" | PEFT's training of biases | biases are the base's, which stays as it is

[training.adapter of p_tuning]
encoder_reparameterization_type | but MLP: "LSTM" | of that network | of PEFT's two networks Sherd has its
    default, MLP

[training.adapter of bottleneck]
original_ln_after | but true alone: false | the block's own norm runs behind a `bottleneck` | the stream would
    not go on behind the adapter
residual_before_ln | but true alone: false | a `bottleneck` adds the stream from in front of that norm | the
    stream would count twice
is_parallel | but false: true | a `bottleneck` reads what its part of the block reads | it would change what
    the adapter computes, and Sherd has one way
use_gating | but false: true | a learned factor for what a `bottleneck` gives | it would change what the
    adapter computes, and Sherd has one way
ln_before | but false: true | a norm of its own in front of a `bottleneck` | it would change what the adapter
    computes, and Sherd has one way
ln_after | but false: true | a norm of its own behind it | it would change what the adapter computes, and
    Sherd has one way

[checkpoint]
tag_validation | tag check | what to do where ranks save under different tags | all ranks write into the one
    folder that the tag names, so they must agree
load_universal | boolean | load DeepSpeed's universal checkpoints | every checkpoint of Sherd's loads into
    every layout of ranks
use_node_local_storage | boolean | each machine saves on a drive of its own | all ranks write into
    training.save_dir, which machines have to share
parallel_write | anything | which ranks write together | ranks always write in parallel
checkpoint_serialization | boolean | how PyTorch writes its files | checkpoints are safetensors
writer | but empty: {"type": "FAST"} | DeepSpeed's own writers of files, such as FAST | checkpoints have one
    writer

[top]
seq_parallel_communication_data_type|seq_parallel_comm_data_type | string | type of what sequence-parallel
    ranks sum | activations travel in the model's type, gradients of the ring in fp32
disable_allgather | but false: true | leave updated parameters where they are | updated parameters are always
    gathered
gradient_allreduce_op | but mean: "sum" | mean or sum of the ranks' gradients | gradients are averaged over
    ranks
managed_gradient_accumulation | but true: false | false: the program says where a step ends | Sherd manages
    it; programs move the boundary with set_gradient_accumulation_boundary()
data_parallel_size | but 1: 2 | ranks of a device mesh | it follows from the number of ranks
use_data_before_expert_parallelism | but false: true | order of data and expert ranks | expert ranks are
    neighbours, and those with the same experts farther apart
sparse_gradients | boolean | exchange embedding gradients as indices and values | embedding gradients are
    exchanged dense, to the same sums
prescale_gradients | boolean | divide gradients before they are summed | rank sums run in fp32, which leaves
    nothing to scale against
gradient_predivide_factor | number | by how much | rank sums run in fp32, which leaves nothing to scale
    against
zero_allow_untested_optimizer | boolean | ZeRO with optimizers that DeepSpeed has not tested | every optimizer
    of this build is tested with ZeRO
zero_force_ds_cpu_optimizer | boolean | insist on DeepSpeed's CPU Adam with offload | Sherd's own optimizer
    runs on every device
disable_python_gc | boolean | no garbage collection within steps | there is no Python
graph_harvesting | boolean | CUDA graphs in the bf16 optimizer; here `device.cuda_graphs` | concerns CUDA
    graphs
vocabulary_size | count | warn where it is no multiple of 8 | model.pad_vocab_to_multiple_of pads the
    embedding
allgather_size | count, never auto | elements per all-gather, beside `"zero_optimization": true` | give
    zero_optimization.allgather_bucket_size
wandb | section | report to Weights & Biases | this service is not in this build; the sections tensorboard and
    csv_monitor, and `sherd train --metrics`, write the same to files | enabled group team project
comet | section | report to Comet | this service is not in this build; the sections tensorboard and
    csv_monitor, and `sherd train --metrics`, write the same to files | enabled samples_log_interval project
    workspace api_key experiment_name experiment_key online mode
flops_profiler | section | count operations of each module | `sherd train` always tells the share of peak
    FLOPs, and --trace what each block takes | enabled recompute_fwd_factor profile_step module_depth
    top_modules detailed output_file
comms_logger | section | log what is sent | every byte sent is always counted and reported at the end of a run
    | enabled prof_all prof_ops verbose debug
timers | section | measure throughput | throughput is always measured | throughput
amp | section but disabled: {"enabled": true} | mixed precision by apex | use bf16 or fp16 | enabled opt_level
    loss_scale cast_model_type patch_torch_functions keep_batchnorm_fp32 master_weights cast_model_outputs
    num_losses verbosity min_loss_scale max_loss_scale
torch_autocast | section but disabled: {"enabled": true} | mixed precision by PyTorch | use bf16 or fp16 |
    enabled dtype lower_precision_safe_modules
elasticity | section but disabled: {"enabled": true} | batch sizes that many numbers of GPUs divide | set the
    batch sizes instead | enabled max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time version
    prefer_larger_batch ignore_non_elastic_batch_info model_parallel_size num_gpus_per_node
autotuning | section but disabled: {"enabled": true} | search for stage and micro-batch | `sherd tune` is
    a command of its own, beside `sherd plan`, which it tries | enabled fast results_dir exps_dir
    overwrite start_profile_step end_profile_step metric metric_path tuner_type tuner_early_stopping
    tuner_num_trials arg_mappings max_train_batch_size min_train_batch_size max_train_micro_batch_size_per_gpu
    min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes mp_size model_info model_info_path
nebula | section | checkpoints to Azure's service | checkpoints go to training.save_dir | enabled
    persistent_storage_path persistent_time_interval num_of_version_in_retention enable_nebula_load load_path
hybrid_engine | section | generate while training (RLHF) | concerns generation between steps, which has no
    engine of its own here | enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters
    tp_gather_partition_size enable_cuda_graph
expert_parallel | section but disabled: {"enabled": true} | share out experts of public models |
    parallel.expert shares out the experts of model.moe | enabled autoep_size expert_tensor_parallel_size
    validate_folding_routing async_split_plan preset_model moe_layer_pattern expert_pattern router_pattern
    use_grouped_mm disable_triton_grouped_mm route_norm route_scale score_apply combine_impl
    row_weighting_impl gate_up_impl comm_backend comm_num_sm comm_qp_margin comm_max_tokens_per_rank
    num_expert_groups num_limited_groups score_func top_k load_balance_coeff routed_scaling_factor expert_w1
    expert_w2 expert_w3 num_experts_attr top_k_attr has_shared_experts shared_experts_pattern
    shared_experts_gate_pattern expert_activation
compile | section | DeepCompile: ZeRO by a graph compiler | there is no graph compiler in this build, and
    nothing for one to do | deepcompile enabled backend kwargs free_activation free_activation_threshold
    offload_activation offload_activation_pin_memory offload_opt_states offload_parameters double_buffer
    symmetric_memory debug_log sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather
    keep_int_input_tensors keep_all_input_tensors passes autoep_non_moe
data_efficiency | section but disabled: {"enabled": true} | sample by difficulty, drop tokens | data is
    sampled as the section `data` says | enabled seed data_sampling data_routing
curriculum_learning | section but disabled: {"enabled": true} | sequences that grow while training | the
    sequence length is fixed in this build | enabled curriculum_type min_difficulty max_difficulty
    schedule_type schedule_config
progressive_layer_drop | section but disabled: {"enabled": true} | leave out layers at random | all layers run
    | enabled theta gamma
eigenvalue | section but disabled: {"enabled": true} | curvature of layers, for quantised training | it serves
    quantised training | enabled verbose max_iter tol stability gas_boundary_resolution layer_name layer_num
compression_training | section but all disabled: {"layer_reduction": {"enabled": true}} | quantise and prune
    while training | training.sparsity prunes; there is no other compression in this build |
    weight_quantization activation_quantization sparse_pruning row_pruning head_pruning channel_pruning
    layer_reduction
quantize_training | section but disabled: {"enabled": true} | quantise weights while training | there is no
    quantisation in this build | enabled quantize_weight_in_forward quantize_verbose quantize_groups
    quantize_bits quantize_schedule quantize_algo fp16_mixed_quantize quantizer_kernel eigenvalue
    quantize_type quantize_rounding quantize_change_ratio
weight_quantization | section but empty: {"post_init_quant": {"fc": {}}} | quantise weights for inference |
    there is no quantisation in this build | enabled post_init_quant quantized_initialization
sparse_attention | section but empty: {"mode": "fixed"} | attention to some blocks only | attention is dense
    in this build; model.sliding_window limits it | mode block different_layout_per_head
    num_local_blocks num_global_blocks attention horizontal_global_attention num_different_global_patterns
    num_random_blocks local_window_blocks global_block_indices global_block_end_indices
    num_sliding_window_blocks
)table";

}  // namespace sherd::config
