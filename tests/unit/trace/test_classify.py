"""Communication is told by what it is: names of every library, and names that only sound like it."""

import pytest

from counterpoint.trace.classify import (
    collective_op,
    dtype_bytes,
    is_barrier,
    is_host_matmul,
    kernel_kind,
    memcpy_kind,
    normal_op,
    torch_dtype,
)
from counterpoint.trace.timeline import Kind

COMMUNICATION = {  # kernel: what it carries out, as far as the name tells
    "ncclAllReduceRingLLKernel_sum_f32(ncclColl)": "all_reduce",
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)": "all_reduce",
    "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)": "send_recv",
    "ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)": "broadcast",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "all_gather",
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "reduce_scatter",
    "ncclSymkDevKernel_AllGather_LL(ncclSymkDevWorkArgs4K)": "all_gather",
    "ncclSymDevKernel_AllReduce_AGxLL_R_sum_bf16(ncclSymDevArgs)": "all_reduce",
    "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)": "nccl",  # RCCL
    "rccl_main_kernel(ncclDevComm*)": "nccl",
    "mscclKernel_Sum_float_LL(ncclDevComm*, mscclAlgo*, mscclWork*)": "nccl",
    "void (anonymous namespace)::allreduce_mscclpp_kernel<__half>(mscclpp::Channel*)": "all_reduce",
    "nvshmemi_barrier_all_kernel(int)": "barrier",
    "void c10d::nvshmem_extension::allToAllV(void*, void*, long*, int)": "all_to_all",
    "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*, int*)": "all_to_all",
    "void deep_ep::intranode::combine<__nv_bfloat16, 8, 768, 4096>(__nv_bfloat16*)": "all_to_all",
    "void deep_ep::intranode::notify_dispatch<8>(int const*, int*)": "notify",
    "void deep_ep::intranode::cached_notify_combine<8>(void**, int*)": "notify",
    "void deep_ep::internode::dispatch<false, 4, false, 28672>(int4*)": "all_to_all",
    "void deep_ep::internode_ll::combine<3, 10, 7168, 9>(void*, void*)": "all_to_all",
    "void deep_ep::internode_ll::dispatch<true, false, 3, 10, 7168>(void*, float*)": "all_to_all",
    "c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int, unsigned long)": "barrier",
    "void one_shot_all_reduce_kernel<c10::BFloat16, 16, 8>(c10::BFloat16**, c10::BFloat16*)": "all_reduce",
    "void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<float, 16, 8>(float**)": "all_reduce",
    "void (anonymous namespace)::multimem_all_gather_kernel<16>(char*, char*, unsigned long)": "all_gather",
    "void c10d::symmetric_memory::multimem_one_shot_all_reduce_kernel<float, 16>(float*)": "all_reduce",
    "c10d::intra_node_comm::oneShotAllReduceKernel<8u, true>(unsigned long)": "all_reduce",
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)": "all_reduce",
    "void vllm::cross_device_reduce_2stage<__half, 4>(vllm::RankData*)": "all_reduce",
    "void tensorrt_llm::kernels::twoShotAllReduceKernel<__half, 8>(AllReduceParams)": "all_reduce",
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<4>(P)": "all_reduce",
    "void userbuffers_fp16_sum_inplace_gpu_rw<8>(int, int, int)": "all_reduce",
    "kuserbuffers_pushsend(int*, int*, int4*, int4*, int)": "send",
    "kuserbuffers_pushrecv(int, int, int*)": "recv",
    "userbuffers_fp16_sum_inplace_gpu_rr_rs<8>(int, int)": "reduce_scatter",
    "userbuffers_fp16_sum_inplace_gpu_rw_ag<8>(int, int)": "all_gather",
    "void dpsk::ep::internode::dispatch<false, 8, true, 8>(int4*, float*)": "all_to_all",
    "void dpsk::ep::internode::dispatch_ll<true, 3, 10, 7168>(void*)": "all_to_all",
    "void dpsk::ep::internode::combine_ll<3, 10, 7168, 9>(void*)": "all_to_all",
    "void dpsk::ep::internode::notify_dispatch<false, 4>(int const*, long*, int)": "notify",
    "void dpsk::ep::internode::cached_notify<true, 8>(int, int, int*)": "notify",
    "void deep_ep::internode_ll::dispatch<(bool)1, (bool)1, (int)6144>(void *, void *, int *)": "all_to_all",
    "void deep_ep::internode_ll::clean_low_latency_buffer<32>(int*, int, int*, int)": "barrier",
    "_ZN7deep_ep9internode8dispatchILb0ELi4EEEvP4int4": "all_to_all",
    "void deep_ep::elastic::dispatch_impl<4, 8>(int*)": "all_to_all",
    "void hybrid_ep::dispatch_kernel<uint16_t>(hybrid_ep::dispatch_kernel_param_t<uint16_t>)": "all_to_all",
    "void hybrid_ep::combine_kernel<4>(hybrid_ep::combine_kernel_param_t)": "all_to_all",
    "hybrid_ep::device_sync_kernel(unsigned int*, unsigned int*)": "barrier",
    "nccl_ep_jit_ht_dispatch_kernel": "all_to_all",
    "mooncake_ep_jit_dispatch_kernel": "all_to_all",
    "void uccl::internode_ll::dispatch<true, false, 7168>(void*)": "all_to_all",
    "void uccl::ep::intranode::combine<__nv_bfloat16, 8>(__nv_bfloat16*)": "all_to_all",
    "void uccl::internode::notify_dispatch<false, 8>(int const*)": "notify",
    "void mori::moe::EpDispatchIntraNodeKernel<hip_bfloat16>(mori::moe::EpDispatchCombineArgs<T>)": "all_to_all",
    "EpCombineInterNodeV1Kernel_bf16": "all_to_all",
    "EpCombineSyncBarrier_bf16": "barrier",
    "void a2a_dispatch_send_kernel<true, 16ul, 8ul, NotFixed, Fixed<8ul>>(unsigned long, unsigned long)": "all_to_all",
    "void a2a_combine_recv_kernel<16ul, 8ul>(unsigned long)": "all_to_all",
    "void (anonymous namespace)::dispatchKernel<10ul, true, true, pplx::FixedDim<8>>(float*)": "all_to_all",
    "void tensorrt_llm::kernels::moe_comm::moeA2ADispatchKernel<BlockPolicy, 8>(DispatchKernelPointers)": "all_to_all",
    "void tensorrt_llm::kernels::moe_comm::moeA2ACombineKernel<__nv_bfloat16, 8>(CombineKernelPointers)": "all_to_all",
    "void tensorrt_llm::kernels::fused_moe_impl::moeAllToAllKernel<8, false>(FusedMoeCommKernelParam)": "all_to_all",
    "flashinfer::trtllm_alltoall::moeAllToAllKernel(MoeEpWorldInfo, MoeCommWorkspace)": "all_to_all",
    "void flashinfer::trtllm_mnnvl_allreduce::twoshotAllreduceKernel<(unsigned char)4, __nv_bfloat16>(P)": "all_reduce",
    "void flashinfer::trtllm_mnnvl_allreduce::rmsNormLamport<__nv_bfloat16, 1>(float*)": "all_reduce",
    "void tensorrt_llm::kernels::mnnvl::oneshotAllreduceFusionKernel<8, __nv_bfloat16>(float*)": "all_reduce",
    "void tensorrt_llm::kernels::lamport_style_one_shot_all_reduce_norm_kernel<__half, 8>(A)": "all_reduce",
    "void tensorrt_llm::kernels::ar_fusion::moe::moereduce_allreduce_fusion_kernel_oneshot_lamport<8>(P)": "all_reduce",
    "void aiter::cross_device_reduce_1stage<std::bfloat16_t, 4, false>(aiter::RankData*)": "all_reduce",
    "_ZN5aiter33reduce_scatter_cross_device_storeIDF16bLi8EEEvPNS_8RankDataENS_11RankSignalsE": "reduce_scatter",
    "void sglang::cross_device_reduce_2stage<__nv_bfloat16, 8>(sglang::RankData*)": "all_reduce",
    "void quickreduce::allreduce_prototype_twoshot<AllReduceTwoshot<__half, CodecQ4<__half,4>>>(T*)": "all_reduce",
    "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)": "all_reduce",
    "void <unnamed>::multimem_all_reduce_kernel<c10::BFloat16, (int)16>(c10::BFloat16 *)": "all_reduce",
    "dlslime::intranode_alltoall_kernel(void*, int)": "all_to_all",
    "rcclGenericKernel<1, false, false>(ncclDevKernelArgsStorage<4096ul>)": "nccl",
    "pcclKernel_twoShotAllReduceKernel": "all_reduce",
    "std::enable_if<(sizeof(float) > 2), void>::type vllm::cross_device_reduce_1stage<float, 2>(float*)": "all_reduce",
}
COMPUTE = [
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float> > >(x)",
    "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long)",
    "void at::native::_scatter_gather_elementwise_kernel<128, 8, at::native::_cuda_scatter_gather_internal_kernel>(x)",
    "void at::native::index_elementwise_kernel<128, 4, x>(long)",
    "void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned int, 2, 2, -2, true>(x)",
    "void cub::DeviceReduceSingleTileKernel<cub::DeviceReducePolicy<float>, float*>(x)",
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<BroadcastAdd>>(int)",
    "void splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(cublasSplitKParams<float>)",
    "void flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4> >(Flash_fwd_params)",
    "void cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::tuple<int> > >(Params)",
    "void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*, int*, int*, int*, bool*, int)",
    "void moe_dispatch_kernel<__nv_bfloat16>(int*, float*)",
    "_moe_combine_kernel",
    "void vllm::moe::topk_gating_dispatch<8>(float*)",
    "triton_poi_fused_all_gather_copy_0",
    "triton_red_fused_reduce_scatter_mean_1",
    "void at::native::(anonymous namespace)::chunk_cat_cuda_kernel<float, c10::BFloat16>(x)",
    "void at::native::split_with_sizes_copy_out_contiguous_no_cast_kernel(char**)",
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTT",
    "void dpsk::ep::cuda::get_dispatch_layout<256, 32, 8>(long const*, int*)",
    "void uccl::layout::get_dispatch_layout<256, 32, 8>(long const*, int*)",
    "void cdpsk::ep::CUB_200200_900_NS::DeviceScanKernel<int>(int*)",
    "void hybrid_ep::scan<512, 132, 8, 1>(bool const*, hybrid_ep::tmp_state_t*)",
    "void tensorrt_llm::kernels::moe_comm::moeA2ASanitizeExpertIdsKernel(int*, int)",
    "moeAllToAllMemsetKernel(MoeEpWorldInfo, int)",
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<c10d::all_reduce_functor>>(int)",
    "void at::native::unrolled_elementwise_kernel<deep_ep::internode::dispatch, std::array<char*, 2ul>>(int)",
    "void cutlass::device_kernel<flux::GemmReduceScatterKernel<nvshmem::Team> >(Params)",
    "gemm_reduce_scatter_kernel",
    "triton_mm_all_gather",
    "_ZN2at6native24_scatter_gather_elementwise_kernelILi128EEEvi",
    "void vllm::moe::moe_align_block_size_kernel<int>(int*)",
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<AllReduce, float>(float*)",
    "void tensorrt_llm::kernels::lamport_initialize_kernel<__half>(__half*, int)",
    "void at::native::index_put_kernel<at::native::AtomicAllReduce>(int) [clone .kd]",
    "Cijk_Alik_Bljk_BBS_BH_MT64x64x32_MI32x32x8x1_SN_1LDSB0_APM1",
]


@pytest.mark.parametrize(("name", "op"), COMMUNICATION.items())
def test_communication_is_told_by_name(name: str, op: str) -> None:
    """A communication kernel, and the collective it belongs to."""
    assert (kernel_kind(name), collective_op(name)) == (Kind.COMM, op)


@pytest.mark.parametrize("name", COMPUTE)
def test_compute_that_sounds_like_communication(name: str) -> None:
    assert kernel_kind(name) is Kind.COMPUTE


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Memcpy PtoP (Device -> Device)", Kind.COMM), ("Memcpy DtoD (Device -> Device)", Kind.MEMCPY),
        ("Memcpy HtoD (Pinned -> Device)", Kind.MEMCPY), ("Memcpy DtoH (Device -> Pageable)", Kind.MEMCPY),
        ("Memset (Device)", Kind.MEMCPY), ("CopyDeviceToDevice", Kind.MEMCPY),
    ],
)  # fmt: skip
def test_only_copies_between_devices_are_communication(name: str, kind: Kind) -> None:
    """A copy from a peer is; one that stays on its device or goes to the host is not."""
    assert memcpy_kind(name) is kind


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("_allgather_base", "all_gather"), ("allgather_into_tensor_coalesced", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"), ("allreduce_coalesced", "all_reduce"),
        ("alltoall_base", "all_to_all"), ("all_to_allv", "all_to_all"), ("_broadcast_oop", "broadcast"),
        ("recvAnySource", "recv"), ("send", "send"), ("gloo:all_reduce", "all_reduce"),
        ("nccl:all_reduce_barrier", "all_reduce"), ("reduce", "reduce"), ("  Wait ", "wait"), ("", "unknown"),
    ],
)  # fmt: skip
def test_operations_carry_pytorchs_names(name: str, op: str) -> None:
    assert normal_op(name) == op


@pytest.mark.parametrize(("op", "empty"), [("barrier", True), ("notify", True), ("all_reduce", False)])
def test_barriers_carry_no_payload(op: str, empty: bool) -> None:
    assert is_barrier(op) is empty


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("BFloat16", 2), ("c10::Half", 2), ("Float8_e4m3fn", 1), ("Long", 8), ("Odd", None), (None, None)],
)
def test_bytes_of_a_dtype(dtype: str | None, size: int | None) -> None:
    """As the profiler spells it; unknown is unknown."""
    assert dtype_bytes(dtype) == size


@pytest.mark.parametrize(
    ("dtype", "name"),
    [("c10::BFloat16", "bfloat16"), ("Float", "float32"), ("c10::Half", "float16"), ("Long", "int64"), ("Odd", None)],
)
def test_torch_names_a_dtype(dtype: str, name: str | None) -> None:
    """C++ has other names for some."""
    assert torch_dtype(dtype) == name


def test_matmuls_of_the_host() -> None:
    """Operations that stand for kernels where there is no GPU."""
    assert [is_host_matmul(name) for name in ("aten::mm", "aten::linear", "aten::mul")] == [True, True, False]
