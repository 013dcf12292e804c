mytest: ; $(WITH_MLX) cargo test --release --locked -p mlx-faststep --test state_bits --test step --test checkpoint --test training 2>&1 | tail -40
myclippy: ; cargo clippy --release --locked --workspace --all-targets -- --deny warnings 2>&1 | tail -60
