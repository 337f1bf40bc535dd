"""The rest of the table: what is not the step itself."""

RUN = """
steps_per_print | int>0? | honoured | `every`: how often to call what `monitor` returns
tensorboard.enabled | bool | honoured | `monitor(output_path/job_name, to="tensorboard")`
csv_monitor.enabled | bool | honoured | `monitor(output_path/job_name, to="csv")`
{tensorboard,csv_monitor}.{output_path,job_name} | text? | honoured | the folder: `output_path/job_name`
wandb.enabled | bool | rejected unless false |
    no writer of this kind; `monitor(dir, to=wandb.log)` calls any function
wandb.{group,team,project} | text? | with wandb.enabled |
comet.enabled | bool | rejected unless false | no writer of this kind; `monitor(dir, to=f)` calls any function
comet.{samples_log_interval,project,workspace,api_key,experiment_name,experiment_key,online,mode}
    | any | with comet.enabled |
wall_clock_breakdown | bool | not needed |
    `profile(train_step, state, batch)` measures compute, communication and idle time
memory_breakdown | bool | not needed | `train_step.lower(state, batch).memory()`
dump_state | bool | not needed | there is no engine; `show(layout)` and `show(state.params)` print what there is
{disable_python_gc,disable_allgather} | bool | not needed | the step is a traced program
vocabulary_size | int? | not needed | DeepSpeed only warns where 8 does not divide it
dataloader_drop_last | bool | not needed | the loader is yours: examples/packed_data.py
log_level | any | not needed | there is no logger
comms_logger.{enabled,prof_all,prof_ops,verbose,debug} | any | not needed |
    `train_step.lower(state, batch).collectives()` lists all; `profile` measures them
flops_profiler.{enabled,recompute_fwd_factor,profile_step,module_depth,top_modules,detailed,output_file}
    | any | not needed | `profile(train_step, state, batch)`
timers.throughput.{enabled,synchronized} | bool | not needed | `monitor` notes tokens per second
use_data_before_expert_parallelism | bool | not needed | the order of the mesh's axes says it
checkpoint.tag_validation | ignore|warn|fail | not needed | one rank decides the name of a checkpoint
checkpoint.load_universal | bool | not needed | `restore` takes every mesh and layout
checkpoint.use_node_local_storage | bool | rejected unless false | ranks write one folder that all of them see
checkpoint.{parallel_write.pipeline_stage,checkpoint_serialization} | bool | not needed |
    every rank writes its own shards
checkpoint.writer.{type,io_buffer_size,io_buffer_double,io_multiplier,show_statistics,data_parallel,decoupled}
    | any | not needed | every rank writes its own shards
datastates_ckpt | any | rejected unless false|null | `save` writes what `torch.distributed.checkpoint` reads
aio.{block_size,queue_depth,thread_count,intra_op_parallelism,single_submit,overlap_events,use_gds}
    | any | not needed | it is for offload to disks, which is rejected where it is asked for
"""

MODEL = """
activation_checkpointing.partition_activations | bool | not needed |
    `remat` keeps its arguments as the loss splits them
activation_checkpointing.cpu_checkpointing | bool | rejected unless false | there is no offload yet
activation_checkpointing.{contiguous_memory_optimization,synchronize_checkpoint_boundary,profile}
    | bool | not needed | the loss says what is recomputed, with `remat`
activation_checkpointing.number_checkpoints | int>=0? | not needed | the loss says what is recomputed, with `remat`
pipeline.stages | int>0 auto= | rejected unless 1 |
    a mesh axis: `make_mesh(pp=4)` and `pipeline(first, stage, last, schedule)`
pipeline.{partition,seed_layers,activation_checkpoint_interval,pipe_partitioned,grad_partitioned,use_reentrant}
    | any | with pipeline.stages |
tensor_parallel.autotp_size | int>=0 | rejected unless 0|1 |
    a mesh axis that specs name: `make_mesh(tp=4)`, `"model hidden/tp"`
tensor_parallel.tp.tp_size | int>0 | rejected unless 1 |
    a mesh axis that specs name: `make_mesh(tp=4)`, `"model hidden/tp"`
tensor_parallel.tp.{tp_grain_size,mpu,tp_group} | any | with tensor_parallel.autotp_size |
tensor_parallel.{dtype,tp_overlap_comm,vocab_parallel_lm_head,vocab_parallel_ce_backend}
    | any | with tensor_parallel.autotp_size |
tensor_parallel.{injection_policy_tuple,preset_model,keep_module_on_host,replace_with_kernel_inject,kernel_inject}
    | any | with tensor_parallel.autotp_size |
tensor_parallel.partition_config.use_default_specs | bool | with tensor_parallel.autotp_size |
tensor_parallel.partition_config.layer_specs.*.{patterns,partition_type,shape,partition_dim,model_types}
    | any | with tensor_parallel.autotp_size |
expert_parallel.enabled | bool | rejected unless false |
    experts are a loss of your own over a mesh axis: examples/moe.py
expert_parallel.{autoep_size,expert_tensor_parallel_size,validate_folding_routing,async_split_plan}
    | any | with expert_parallel.enabled |
expert_parallel.{preset_model,moe_layer_pattern,expert_pattern,router_pattern,use_grouped_mm,disable_triton_grouped_mm}
    | any | with expert_parallel.enabled |
expert_parallel.{route_norm,route_scale,score_apply,score_func,top_k,load_balance_coeff,routed_scaling_factor}
    | any | with expert_parallel.enabled |
expert_parallel.{combine_impl,row_weighting_impl,gate_up_impl,expert_activation}
    | any | with expert_parallel.enabled |
expert_parallel.{comm_backend,comm_num_sm,comm_qp_margin,comm_max_tokens_per_rank}
    | any | with expert_parallel.enabled |
expert_parallel.{num_expert_groups,num_limited_groups,expert_w1,expert_w2,expert_w3,num_experts_attr,top_k_attr}
    | any | with expert_parallel.enabled |
expert_parallel.{has_shared_experts,shared_experts_pattern,shared_experts_gate_pattern}
    | any | with expert_parallel.enabled |
hybrid_engine.enabled | bool | rejected unless false | there is no inference engine here
hybrid_engine.{max_out_tokens,inference_tp_size,release_inference_cache,pin_parameters,tp_gather_partition_size}
    | any | with hybrid_engine.enabled |
hybrid_engine.enable_cuda_graph | bool | with hybrid_engine.enabled |
weight_quantization.{enabled,quantized_initialization,post_init_quant,num_bits,q_type,q_groups} | any | rejected |
    weights are not quantized
compile.deepcompile | bool | not needed | `jit` traces and compiles the whole step
compile.{free_activation,free_activation_threshold,autoep_non_moe,double_buffer,symmetric_memory}
    | any | not needed | `jit` traces and compiles the whole step
compile.{sync_before_reduce,sync_after_reduce,sync_before_allgather,sync_after_allgather,debug_log}
    | bool | not needed | `jit` traces and compiles the whole step
compile.{keep_int_input_tensors,keep_all_input_tensors} | bool | not needed |
    `jit` traces and compiles the whole step
compile.{offload_activation,offload_opt_states,offload_parameters} | bool | rejected unless false |
    there is no offload yet
compile.offload_activation_pin_memory | bool | with compile.offload_activation |
compile.passes | list? | rejected unless null|[] | passes are those of `jit`, and a layout says what is split
"""

DATA = """
data_efficiency.enabled | bool | rejected unless false | the loader is yours; a loss drops what tokens it likes
data_efficiency.{seed,data_routing.enabled} | any | with data_efficiency.enabled |
data_efficiency.data_routing.random_ltd.{enabled,total_layer_num,random_ltd_layer_num,random_ltd_layer_id}
    | any | with data_efficiency.enabled |
data_efficiency.data_routing.random_ltd.{model_mask_name,model_type,hidden_state_order}
    | any | with data_efficiency.enabled |
data_efficiency.data_routing.random_ltd.{micro_batch_size,global_batch_size,layer_token_lr_schedule}
    | any | with data_efficiency.enabled |
data_efficiency.data_routing.random_ltd.random_ltd_schedule.{min_value,max_value,schedule_type}
    | any | with data_efficiency.enabled |
data_efficiency.data_routing.random_ltd.random_ltd_schedule.schedule_config.{require_steps,seq_per_step}
    | any | with data_efficiency.enabled |
data_efficiency.data_sampling.{enabled,num_epochs,num_workers,pin_memory} | any | with data_efficiency.enabled |
data_efficiency.data_sampling.curriculum_learning.{enabled,data_cluster_path} | any | with data_efficiency.enabled |
data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*.{index_to_sample_path,index_to_metric_path}
    | any | with data_efficiency.enabled |
data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*.{difficulty_type,clustering_type}
    | any | with data_efficiency.enabled |
data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*.{min_difficulty,max_difficulty,schedule_type}
    | any | with data_efficiency.enabled |
data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*.schedule_config.{total_curriculum_step,difficulty_step}
    | any | with data_efficiency.enabled |
data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*.schedule_config.{root_degree,difficulty,max_step}
    | any | with data_efficiency.enabled |
data_efficiency.data_sampling.dynamic_batching.{enabled,metrics_path,lr_scaling_method,min_batch_size,max_batch_size}
    | any | with data_efficiency.enabled |
data_efficiency.data_sampling.dynamic_batching.{sequence_picking_order,max_tokens,verbose}
    | any | with data_efficiency.enabled |
autotuning.enabled | bool | rejected unless false | batch size and stage are what the config says
autotuning.{fast,results_dir,exps_dir,overwrite,start_profile_step,end_profile_step,metric,metric_path}
    | any | with autotuning.enabled |
autotuning.{tuner_type,tuner_early_stopping,tuner_num_trials,arg_mappings,model_info_path,mp_size}
    | any | with autotuning.enabled |
autotuning.{max_train_batch_size,min_train_batch_size,num_tuning_micro_batch_sizes}
    | any | with autotuning.enabled |
autotuning.{max_train_micro_batch_size_per_gpu,min_train_micro_batch_size_per_gpu} | any | with autotuning.enabled |
autotuning.model_info.{profile,num_params,hidden_size,num_layers} | any | with autotuning.enabled |
{nebula,compression_training,amp,quantize_training,sparse_gradients,eigenvalue,sparse_attention}
    | any | rejected | removed from DeepSpeed
{elasticity,graph_harvesting,curriculum_learning,progressive_layer_drop} | any | rejected | removed from DeepSpeed
"""
