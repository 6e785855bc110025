// The attention kernels that exist: a name, the element type, phi, and the class of post (FlashPost in flash.h). Each
// row is a translation unit, flash_instance.cu with -DINSTANCE=FLASH_name, so that they build in parallel.
//
// First match wins. The last three rows of each type handle everything else, because they select phi at run time. (Each
// phi has a plain row in bf16; `any` is for a new phi and for post=rectify, see flash_rectifies.) Adding a row makes a
// normalizer faster and the build longer.
FLASH_INSTANCE(exp, bf16, PHI_EXP, FLASH_PLAIN)
FLASH_INSTANCE(exp_recenter, bf16, PHI_EXP, FLASH_RECENTER)
FLASH_INSTANCE(exp_recenter_l1, bf16, PHI_EXP, FLASH_RECENTER_L1)
FLASH_INSTANCE(softplus, bf16, PHI_SOFTPLUS, FLASH_PLAIN)
FLASH_INSTANCE(softplus_reweight, bf16, PHI_SOFTPLUS, FLASH_REWEIGHT)
FLASH_INSTANCE(sigmoid, bf16, PHI_SIGMOID, FLASH_PLAIN)
FLASH_INSTANCE(identity, bf16, PHI_IDENTITY, FLASH_PLAIN)
FLASH_INSTANCE(relu, bf16, PHI_RELU, FLASH_PLAIN)
FLASH_INSTANCE(relu2, bf16, PHI_RELU2, FLASH_PLAIN)
FLASH_INSTANCE(gelu, bf16, PHI_GELU, FLASH_PLAIN)
FLASH_INSTANCE(relu6, bf16, PHI_RELU6, FLASH_PLAIN)
FLASH_INSTANCE(mish, bf16, PHI_MISH, FLASH_PLAIN)
FLASH_INSTANCE(expm1, bf16, PHI_EXPM1, FLASH_PLAIN)
FLASH_INSTANCE(any, bf16, FLASH_ANY_PHI, FLASH_PLAIN)
FLASH_INSTANCE(any_recenter, bf16, FLASH_ANY_PHI, FLASH_RECENTER)
FLASH_INSTANCE(any_two_sweeps, bf16, FLASH_ANY_PHI, FLASH_TWO_SWEEPS)
FLASH_INSTANCE(float, float, FLASH_ANY_PHI, FLASH_PLAIN)
FLASH_INSTANCE(float_recenter, float, FLASH_ANY_PHI, FLASH_RECENTER)
FLASH_INSTANCE(float_two_sweeps, float, FLASH_ANY_PHI, FLASH_TWO_SWEEPS)
