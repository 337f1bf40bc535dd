"""What becomes of every key of a DeepSpeed 0.19.8 config that has to do with training. docs/deepspeed.md shows it.

A row: keys (`a.{b,c}` is `a.b` and `a.c`, `*` any name) | what a value is | what becomes of it | how, or why.
"""

BATCH = """
train_batch_size | int>0? auto=batch? | honoured | `batch`, the rows of a step: micro-batch x accumulation x ranks
train_micro_batch_size_per_gpu | int>0? auto=microbatch? | honoured |
    `microbatch`, the rows of a micro-batch on a rank
gradient_accumulation_steps | int>0? auto=accumulate? | honoured | `step(accumulate=)`
managed_gradient_accumulation | bool | rejected unless true |
    a step takes the whole batch; for one update of several calls: `optim.accumulate`
gradient_clipping | number>=0 auto=clip | honoured |
    `step(clip=)`; 1.0 where it is not given, as DeepSpeed has it; 0: none
communication_data_type | fp16|bf16|fp32? | honoured | `precision(reduce=)`; by default that of `fp16` or `bf16`
seq_parallel_communication_data_type | fp16|bf16|fp32? | not needed |
    what a loss sends has the dtype that the loss gives it
gradient_allreduce_op | mean|sum | rejected unless "mean" |
    a step divides by the weight of the whole batch; multiply the loss for another scale
prescale_gradients | bool | not needed | gradients are divided by the weight of the batch before they are added up
gradient_predivide_factor | number>0 | not needed |
    gradients are divided by the weight of the batch before they are added up
sequence_parallel_size | int>0 | rejected unless 1 |
    a mesh axis that the specs of batch and loss name: `make_mesh(sp=4)`, examples/ulysses.py
"""

OPTIMIZER = """
optimizer.type | text | honoured |
    Adam, AdamW, Lamb, Lion, Muon, or torch's SGD, as an optimizer of `sl.optim`; others are rejected
optimizer.legacy_fusion | bool | not needed | there is one way to run an optimizer
optimizer.params.lr | number>=0 auto=lr | honoured | the rate, unless there is a scheduler
optimizer.params.betas | pair auto=betas | honoured | `b1`, `b2`
optimizer.params.eps | number>=0 auto=eps | honoured | `eps`
optimizer.params.weight_decay | number>=0 auto=weight_decay | honoured |
    `weight_decay`; torch's AdamW has 0.01 by default
optimizer.params.adam_w_mode | bool | honoured | true, the default, makes Adam AdamW; false: `optim.adam`
optimizer.params.torch_adam | bool | honoured | the same numbers; torch's default of weight_decay
optimizer.params.bias_correction | bool | rejected unless true | optimizers of `sl.optim` correct their averages
optimizer.params.amsgrad | bool | rejected unless false | there is no AMSGrad, nor has DeepSpeed's FusedAdam one
optimizer.params.maximize | bool | rejected unless false | negate the loss
optimizer.params.{set_grad_none,foreach,fused,capturable,differentiable} | bool? | not needed |
    gradients are values, and the step is traced
optimizer.params.fp32_optimizer_states | bool? | not needed | moments are float32 or wider
optimizer.params.max_grad_norm | number | rejected | as in DeepSpeed: write `gradient_clipping`
optimizer.params.momentum | number>=0 | honoured | of Muon and SGD
optimizer.params.nesterov | bool | honoured | of SGD
optimizer.params.dampening | number>=0 | rejected unless 0 | `optim.sgd` has none
optimizer.params.{muon_lr,adam_lr} | number>=0 auto=lr | honoured |
    the rates of Muon's matrices and of all other leaves
optimizer.params.ns_method | gram|standard | not needed |
    two orders of one iteration; `optim.muon` runs it in float32
optimizer.params.per_head_muon | bool | rejected unless false |
    name the heads: `spec(matrix=)` says what a matrix is
optimizer.params.{max_coeff,min_coeff} | number>=0 | honoured | of Lamb: bounds of its trust ratio; 0.01 and 10
optimizer.params.eps_inside_sqrt | bool | rejected unless false | `optim.lamb` adds `eps` to the root
scheduler.type | WarmupLR|WarmupDecayLR|WarmupCosineLR|OneCycle|LRRangeTest | honoured |
    a schedule of `sl.optim`, as DeepSpeed's engine calls it
scheduler.params.warmup_min_lr | number>=0 auto= | honoured | `start`
scheduler.params.warmup_max_lr | number>=0? auto= | honoured |
    `peak`; by default, and as "auto", the optimizer's rate (WarmupDecayLR: 0.001)
scheduler.params.warmup_num_steps | int>0 auto=warmup | honoured | `warmup`
scheduler.params.warmup_type | log|linear | honoured | `kind`; "log" by default
scheduler.params.total_num_steps | int>0 auto=steps | honoured | `steps`
scheduler.params.{warmup_min_ratio,cos_min_ratio} | number>=0 | honoured |
    `start` and `end`, times the optimizer's rate
scheduler.params.{cycle_min_lr,cycle_max_lr} | number>=0 | honoured | `start` and `peak` of `one_cycle`
scheduler.params.{cycle_first_step_size,cycle_second_step_size} | int>0? | honoured | `up` and `down`
scheduler.params.{cycle_first_stair_count,cycle_second_stair_count} | int>=0? | honoured |
    `up_stairs` and `down_stairs`
scheduler.params.{decay_lr_rate,decay_step_size} | number>=0 | honoured | `decay_rate` and `decay_steps`
scheduler.params.cycle_momentum | bool | honoured |
    Adam's b1 by `one_cycle_momentum`, its b2 0.99; true by default, and rejected for Lamb, Lion and Muon
scheduler.params.{cycle_min_mom,cycle_max_mom,decay_mom_rate} | number>=0 | honoured | `low`, `high`, `decay_rate`
scheduler.params.lr_range_test_min_lr | number>=0 | honoured | `start` of `lr_range_test`
scheduler.params.lr_range_test_step_size | int>0 | honoured | `steps`
scheduler.params.lr_range_test_step_rate | number>=0 | honoured | `rate`
scheduler.params.lr_range_test_staircase | bool | honoured | `staircase`
zero_allow_untested_optimizer | bool | not needed | every optimizer runs under every layout
zero_force_ds_cpu_optimizer | bool | not needed | optimizers run where their state is
"""

PRECISION = """
fp16.enabled | bool auto=fp16 | honoured |
    `precision(compute="f16", params="f16")`; float32 masters are in the optimizer's state
fp16.loss_scale | number>=0 | honoured | 0: `dynamic_scale`; else a scale that stays
fp16.initial_scale_power | int>=0 | honoured | `dynamic_scale(2.0**power)`
fp16.loss_scale_window | int>0 | honoured | `window`
fp16.hysteresis | int>0 | honoured | `hysteresis`; 1 without ZeRO, as in DeepSpeed
fp16.consecutive_hysteresis | bool | honoured | `consecutive`
fp16.min_loss_scale | number>=0 | honoured |
    `minimum`; a step raises after 50 skips in a row, not at the first one at the minimum
fp16.auto_cast | bool | not needed | a batch is never cast; a loss casts what it computes with: `x.to(w.dtype)`
fp16.fp16_master_weights_and_grads | bool | rejected unless false | masters of 16-bit leaves are float32
{bf16,bfloat16}.enabled | bool auto=bf16 | honoured |
    `precision(compute="bf16", params="bf16")`; float32 masters are in the optimizer's state
{bf16,bfloat16}.check_grad_overflow | bool | honoured |
    true, the default: steps that are not finite are skipped, `precision(scale=1.0)`
{bf16,bfloat16}.immediate_grad_update | bool | not needed |
    gradients are values: the compiler decides when they are added up
{bf16,bfloat16}.bf16_master_weights_and_grads | bool | rejected unless false | masters of 16-bit leaves are float32
{bf16,bfloat16}.bf16_optimizer_states | bool | rejected unless false | moments are float32 or wider
torch_autocast.enabled | bool | rejected unless false |
    dtypes are the loss's own; `fp16` and `bf16` cast its parameters
torch_autocast.{dtype,lower_precision_safe_modules} | any | with torch_autocast.enabled |
data_types.grad_accum_dtype | fp16|bf16|fp32? | not needed | gradients of micro-batches add up in float32 or wider
data_types.{param_dtype,buffer_dtype} | text? | rejected unless null |
    parameters have the dtype that `fp16` or `bf16` gives them; buffers are the loss's `extra`
data_types.keep_in_fp32_modules | any | not needed |
    buffers are the loss's `extra`, which is never cast; for parameters: `precision(keep=)`
"""

ZERO = """
zero_optimization.stage | 0|1|2|3 | honoured | `zero(stage=)`
zero_optimization.{stage3_param_persistence_threshold,param_persistence_threshold} | int>=0 | honoured |
    stage 3 leaves parameters of so few elements whole, `zero(min_size=)`; cut where it is not given
zero_optimization.zero_hpz_partition_size | int>0 | honoured |
    stage 3: a mesh `dp=dict(node=, gpu=)`, weights gathered over nodes once a step
zero_optimization.{zero_quantized_weights,zero_quantized_nontrainable_weights,zero_quantized_gradients}
    | bool | rejected unless false
    | nothing is quantized on its way yet; `communication_data_type` of 16 bits is there
zero_optimization.offload_optimizer.device | none|cpu|nvme | rejected unless "none" | there is no offload yet
zero_optimization.offload_param.device | none|cpu|nvme | rejected unless "none" | there is no offload yet
zero_optimization.offload_optimizer.{nvme_path,buffer_count,pin_memory,pipeline_read,pipeline_write,fast_init,ratio}
    | any | with zero_optimization.offload_optimizer.device |
zero_optimization.offload_optimizer.{super_offload,cpuadam_cores_perc}
    | any | with zero_optimization.offload_optimizer.device |
zero_optimization.offload_param.{nvme_path,buffer_count,buffer_size,max_in_cpu,pin_memory}
    | any | with zero_optimization.offload_param.device |
zero_optimization.{cpu_offload,cpu_offload_param} | bool? | rejected unless false|null | there is no offload yet
zero_optimization.cpu_offload_use_pin_memory | bool? | with zero_optimization.cpu_offload |
zero_optimization.zenflow.{topk_ratio,select_strategy,select_interval,update_interval,overlap_step,offload}
    | any | rejected | there is no offload yet, and every gradient is used in its step
zero_optimization.zenflow.{auto_ratio,full_warm_up_rounds,pt_reserved_cores_perc} | any | rejected |
    there is no offload yet, and every gradient is used in its step
zero_optimization.{mics_shard_size,mics_hierarchical_params_gather} | any | rejected |
    removed from DeepSpeed; `make_mesh(dp=dict(node=4, gpu=8))` and `zero(axis="gpu")`:
    examples/hybrid_sharding.py
zero_optimization.zeropp_loco_param | any | rejected | removed from DeepSpeed
zero_optimization.{reduce_bucket_size,allgather_bucket_size,stage3_prefetch_bucket_size,prefetch_bucket_size}
    | int>=0 | not needed
    | `jit` merges small collectives up to 16 MB (4 MB on the CPU); `passes.bucket(limit=)` is for another size
allgather_size | int>=0 | not needed |
    `jit` merges small collectives up to 16 MB (4 MB on the CPU); `passes.bucket(limit=)` is for another size
zero_optimization.{contiguous_gradients,use_multi_rank_bucket_allreduce,round_robin_gradients,parameter_alignment}
    | bool | not needed | how DeepSpeed lays out its buffers; gradients are values of a traced program
zero_optimization.{reduce_scatter,allgather_partitions,overlap_comm,sub_group_size} | any | not needed |
    the layout says what is scattered and gathered; passes of `jit` place it beside compute
zero_optimization.{allgather_sequential,stage3_allgather_sequential} | bool | not needed |
    passes of `jit` merge and place what is gathered
zero_optimization.{use_all_reduce_for_fetch_params,stage3_use_all_reduce_for_fetch_params} | bool | not needed |
    passes of `jit` merge and place what is gathered
zero_optimization.{stage3_max_live_parameters,max_live_parameters,stage3_max_reuse_distance,max_reuse_distance}
    | int>=0 | not needed | a loss says where weights are whole: between `gather` and the end of what `remat` wraps
zero_optimization.{stage3_model_persistence_threshold,model_persistence_threshold} | any | not needed |
    the bound of `stage3_param_persistence_threshold` is for each leaf alone
zero_optimization.{stage3_module_granularity_threshold,module_granularity_threshold} | int>=0 | not needed |
    there are no hooks on modules
zero_optimization.leaf_module.{classes,names,name_suffixes} | any | not needed | there are no hooks on modules
zero_optimization.{memory_efficient_linear,override_module_apply,log_trace_cache_warnings,enable_sanity_checks}
    | bool | not needed | there are no hooks on modules
zero_optimization.{stage3_gather_16bit_weights_on_model_save,gather_16bit_weights_on_model_save}
    | bool | not needed | `gather(state.params)` gives whole weights
zero_optimization.stage3_gather_fp16_weights_on_model_save | bool | not needed |
    `gather(state.params)` gives whole weights
zero_optimization.{elastic_checkpoint,load_from_fp32_weights,pipeline_loading_checkpoint} | bool | not needed |
    `save` and `restore` take every mesh and layout
zero_optimization.{compute_grad_norm,legacy_stage1,save_muon_momentum_buffer_in_memory} | bool | not needed |
    there is one implementation, and the norm is a metric of the step
zero_optimization.ignore_unused_parameters | bool | not needed | the gradient of an unused parameter is zero
"""
