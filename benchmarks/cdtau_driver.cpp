// Copyright Contributors to the ebmpp Project.
// SPDX-License-Identifier: Apache-2.0
//
// What benchmarks/cdtau.py calls: the sum of cdtau's gradients over pairs, without R.
#include "mcmc.h"

using Matrix = Eigen::MatrixXf;
using Vector = Eigen::VectorXf;

// Columns of `start` are the rows that pairs begin at; every second pair is antithetic to the one before, as in
// cdtau's own loop. Returns the sum of meeting times, and the longest.
extern "C" double run_pairs(int visible, int latent, const float* weights, const float* bias, const float* latent_bias,
                            const float* start, int pairs, int seed, int threads, int most, float* gradient,
                            int* longest)
{
    const Eigen::Map<const Matrix> w(weights, visible, latent), v0(start, visible, pairs);
    const Eigen::Map<const Vector> b(bias, visible), c(latent_bias, latent);
    Eigen::Map<Matrix> total(gradient, visible, latent);
    total.setZero();
    double sum = 0;
    int last = 0;
    #pragma omp parallel for schedule(dynamic) num_threads(threads) reduction(+ : sum) reduction(max : last)
    for (int pair = 0; pair < pairs; pair++) {
        const int first = pair - pair % 2;
        RNGEngine words(seed + first);
        RBMSampler<float> sampler(w, b, c);
        Vector db(visible), dc(latent);
        Matrix dw(visible, latent);
        float tau = 0, discarded = 0;
        sampler.sample_and_update_grad(words, pair != first, v0.col(first), db, dc, dw, tau, discarded, 1, most, false);
        #pragma omp critical
        total += dw;
        sum += tau;
        last = std::max(last, static_cast<int>(tau));
    }
    *longest = last;
    return sum;
}
