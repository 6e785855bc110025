// The attention kernels that exist: a name, the element type, phi, and the post (POST_NONE: any plain one, see
// post_is_plain() in flash.h). Each row is a translation unit, flash_instance.cu with -DINSTANCE=FLASH_name, so that
// they build in parallel.
//
// First match wins. The last rows of each type, one for each post, handle everything else, because they select phi at
// run time. (Each phi has a plain row in bf16; `any` is for a new phi, a cap and post=rectify, see flash_find.)
// Adding a row makes a normalizer faster and the build longer.
FLASH_INSTANCE(exp, bf16, PHI_EXP, POST_NONE)
FLASH_INSTANCE(exp_recenter, bf16, PHI_EXP, POST_RECENTER)
FLASH_INSTANCE(exp_recenter_l1, bf16, PHI_EXP, POST_RECENTER_L1)
FLASH_INSTANCE(softplus, bf16, PHI_SOFTPLUS, POST_NONE)
FLASH_INSTANCE(softplus_reweight, bf16, PHI_SOFTPLUS, POST_REWEIGHT)
FLASH_INSTANCE(sigmoid, bf16, PHI_SIGMOID, POST_NONE)
FLASH_INSTANCE(identity, bf16, PHI_IDENTITY, POST_NONE)
FLASH_INSTANCE(relu, bf16, PHI_RELU, POST_NONE)
FLASH_INSTANCE(relu2, bf16, PHI_RELU2, POST_NONE)
FLASH_INSTANCE(gelu, bf16, PHI_GELU, POST_NONE)
FLASH_INSTANCE(relu6, bf16, PHI_RELU6, POST_NONE)
FLASH_INSTANCE(mish, bf16, PHI_MISH, POST_NONE)
FLASH_INSTANCE(expm1, bf16, PHI_EXPM1, POST_NONE)
FLASH_INSTANCE(any, bf16, FLASH_ANY_PHI, POST_NONE)
FLASH_INSTANCE(any_recenter, bf16, FLASH_ANY_PHI, POST_RECENTER)
FLASH_INSTANCE(any_recenter_l1, bf16, FLASH_ANY_PHI, POST_RECENTER_L1)
FLASH_INSTANCE(any_reweight, bf16, FLASH_ANY_PHI, POST_REWEIGHT)
FLASH_INSTANCE(float, float, FLASH_ANY_PHI, POST_NONE)
FLASH_INSTANCE(float_recenter, float, FLASH_ANY_PHI, POST_RECENTER)
FLASH_INSTANCE(float_recenter_l1, float, FLASH_ANY_PHI, POST_RECENTER_L1)
FLASH_INSTANCE(float_reweight, float, FLASH_ANY_PHI, POST_REWEIGHT)
