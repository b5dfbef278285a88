'use strict';
// From a cell's text to what is evaluated: types stripped, `import` made to work where modules cannot be.
// Runs in the service, which is warm; needs --expose-internals for node's own copy of acorn.

const { stripTypeScriptTypes } = require('node:module');
const { IMPORT } = require('./wire');

let acorn = null;
try {
  acorn = require('internal/deps/acorn/acorn/dist/acorn');
} catch {
  // Another node: cells must do without import.
}

// TypeScript to JavaScript, lines kept. Throws a SyntaxError that names the place.
function strip(code) {
  if (typeof stripTypeScriptTypes !== 'function') {
    throw new SyntaxError(`this node (${process.version}) cannot read TypeScript: 22.13 or newer can`);
  }
  try {
    return stripTypeScriptTypes(code, { mode: 'strip' });
  } catch (error) {
    if (error.code === 'ERR_UNSUPPORTED_TYPESCRIPT_SYNTAX') {
      try {
        return stripTypeScriptTypes(code, { mode: 'transform' }); // enums, namespaces, parameter properties
      } catch (second) {
        throw new SyntaxError(second.message);
      }
    }
    throw new SyntaxError(error.message);
  }
}

// The same program without import and export declarations. What cannot be parsed is left to V8 to refuse.
function rewrite(code) {
  if (acorn === null || !/\b(import|export)\b/.test(code)) return code;
  const tree = parse(code);
  if (tree === null) return code;
  const changes = [];
  for (const node of tree.body) declaration(node, code, changes);
  imports(tree, changes);
  changes.sort((a, b) => b.start - a.start);
  for (const { start, end, text } of changes) {
    const lines = code.slice(start, end).split('\n').length - 1;
    const missing = Math.max(0, lines - (text.split('\n').length - 1));
    code = code.slice(0, start) + text + '\n'.repeat(missing) + code.slice(end);
  }
  return code;
}

function parse(code) {
  const common = { ecmaVersion: 'latest', allowAwaitOutsideFunction: true, allowHashBang: true };
  for (const sourceType of ['module', 'script']) {
    try {
      return acorn.parse(code, { ...common, sourceType });
    } catch {
      // The next one, or nobody.
    }
  }
  return null;
}

function declaration(node, code, changes) {
  const { start, end } = node;
  switch (node.type) {
    case 'ImportDeclaration':
      changes.push({ start, end, text: importing(node, code) });
      break;
    case 'ExportAllDeclaration':
      changes.push({ start, end, text: `await ${IMPORT}(${node.source.raw});` });
      break;
    case 'ExportNamedDeclaration':
      // `export const x = 1` keeps what it declares.
      if (node.declaration) changes.push({ start, end: node.declaration.start, text: '' });
      else changes.push({ start, end, text: node.source ? `await ${IMPORT}(${node.source.raw});` : '' });
      break;
    case 'ExportDefaultDeclaration':
      changes.push({ start, end: node.declaration.start, text: node.declaration.id ? '' : 'void ' });
      break;
  }
}

function importing(node, code) {
  const attributes = (node.attributes ?? []).map((a) => `${code.slice(a.key.start, a.key.end)}: ${a.value.raw}`);
  const more = attributes.length ? `, { with: { ${attributes.join(', ')} } }` : '';
  const call = `await ${IMPORT}(${node.source.raw}${more})`;
  const names = [];
  let namespace = null;
  for (const item of node.specifiers) {
    const local = item.local.name;
    if (item.type === 'ImportNamespaceSpecifier') namespace = local;
    else if (item.type === 'ImportDefaultSpecifier') names.push(`default: ${local}`);
    else names.push(`${code.slice(item.imported.start, item.imported.end)}: ${local}`);
  }
  if (namespace !== null) {
    return `const ${namespace} = ${call}${names.length ? `, { ${names.join(', ')} } = ${namespace}` : ''};`;
  }
  return names.length ? `const { ${names.join(', ')} } = ${call};` : `${call};`;
}

// Every `import(...)` in the tree.
function imports(root, changes) {
  const todo = [root];
  while (todo.length) {
    const node = todo.pop();
    if (node.type === 'ImportExpression') changes.push({ start: node.start, end: node.start + 6, text: IMPORT });
    for (const value of Object.values(node)) {
      if (Array.isArray(value)) todo.push(...value.filter((item) => item && typeof item.type === 'string'));
      else if (value && typeof value.type === 'string') todo.push(value);
    }
  }
}

module.exports = { strip, rewrite };
