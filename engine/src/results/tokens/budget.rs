//! Divides a token budget. Pure.

/// Divides a budget among several needs. Needs below an even share are met in full, and the others
/// share the remainder evenly. The shares never add up to more than the budget.
pub(crate) fn divide_budget(budget: usize, needs: &[usize]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..needs.len()).collect();
    order.sort_by_key(|index| needs[*index]);
    let mut shares = vec![0; needs.len()];
    let mut left = budget;
    for (place, index) in order.into_iter().enumerate() {
        let even = left / (needs.len() - place);
        shares[index] = needs[index].min(even);
        left -= shares[index];
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_small_take_what_they_need_and_the_large_share_the_rest() {
        assert_eq!(divide_budget(100, &[10, 500, 20, 1_000]), [10, 35, 20, 35]);
        assert_eq!(divide_budget(100, &[10, 20]), [10, 20]);
        assert_eq!(divide_budget(100, &[1_000]), [100]);
        assert_eq!(divide_budget(3, &[5, 5, 5, 5]), [0, 1, 1, 1]);
        assert_eq!(divide_budget(100, &[]), [0; 0]);
        for budget in 0..50 {
            let shares = divide_budget(budget, &[7, 0, 31, 4, 4, 90]);
            assert!(shares.iter().sum::<usize>() <= budget, "{budget}: {shares:?}");
        }
    }
}
