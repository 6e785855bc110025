// Attention in double (-include for its sources, see the Makefile), next to the library's in float32.
#ifndef DEV_TESTS_IN_DOUBLE_H
#define DEV_TESTS_IN_DOUBLE_H

#define REAL double
#define attention_of_few attention_of_few_in_double
#define attention_scratch attention_scratch_in_double
#define attention_forward attention_forward_in_double
#define attention_backward attention_backward_in_double
#define attention_row attention_row_in_double
#define attention_weights attention_weights_in_double
#define attention_window_starts attention_window_starts_in_double
#define attention_weights_of_scores attention_weights_of_scores_in_double
#define row_at row_at_in_double
#define row_keep row_keep_in_double
#define row_recall row_recall_in_double
#define row_forward row_forward_in_double
#define row_in_parts row_in_parts_in_double
#define row_take row_take_in_double
#define row_finish row_finish_in_double
#define row_backward row_backward_in_double
#define query_scores query_scores_in_double
#define query_forward query_forward_in_double
#define query_backward query_backward_in_double
#define tiles_name tiles_name_in_double
#define tiles_left tiles_left_in_double
#define tiles_pack tiles_pack_in_double
#define tiles_pair tiles_pair_in_double
#define tiles_begin tiles_begin_in_double
#define tiles_end tiles_end_in_double
#define tiles_available tiles_available_in_double
#define tiles_multiply tiles_multiply_in_double
#define tiles_take_transposed tiles_take_transposed_in_double
#define gemm gemm_in_double
#define gemm_run gemm_run_in_double

#endif
