// Recommended rules, and others that find faults. Names of the page's modules are known to TypeScript (tsconfig.json).

import js from "@eslint/js";

export default [
  js.configs.recommended,
  {
    linterOptions: { reportUnusedDisableDirectives: "error" },
    rules: {
      "array-callback-return": ["error", { checkForEach: false }],
      "consistent-return": "error",
      "eqeqeq": ["error", "always", { null: "ignore" }], // `value == null` is true of undefined, too
      "no-constructor-return": "error",
      "no-implicit-globals": "error",
      "no-promise-executor-return": "error",
      "no-self-compare": "error",
      "no-shadow": ["error", { allow: ["_"] }],
      "no-template-curly-in-string": "error",
      "no-throw-literal": "error",
      "no-unmodified-loop-condition": "error",
      "no-unreachable-loop": "error",
      "no-unused-expressions": "error",
      "no-unused-vars": ["error", { args: "all", argsIgnorePattern: "^_" }],
      "no-use-before-define": ["error", { functions: false, classes: false, variables: false }],
      "no-var": "error",
      "prefer-const": "error",
      "radix": "error",
      "require-atomic-updates": "error",
    },
  },
  { files: ["mpi4dl_nb/page/**"], rules: { "no-undef": "off" } },
  { files: ["tests/page/**"], languageOptions: { globals: { Event: "readonly", EventTarget: "readonly" } } },
];
